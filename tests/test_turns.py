"""Several turns on one cache through generate: new tokens alone and the full ids give the same, at true positions."""

from __future__ import annotations

import pytest
import reference_model as ref
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, References, streaming

import lighttransfer
from lighttransfer.cache import LightTransferCache

#: Turns shorter and longer than the window of eight, and one token.
TURNS = [tiny_models.prompt(length, seed=70 + length) for length in (3, 29, 1, WINDOW_SIZE)]


@pytest.mark.parametrize("only_new", [True, False], ids=["new tokens", "full ids"])
@pytest.mark.parametrize("length", [47, 5], ids=["long", "inside the window"])
def test_turns_are_the_reference_at_true_positions(length: int, only_new: bool) -> None:
    """The choice falls at the end of the first prompt that outgrows the window, and stays what it is."""
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, full_layers=2, n_last=N_LAST, **WINDOW)
    cache, cut = LightTransferCache(model.config), {}
    row: list[int] = []
    for turn in [tiny_models.prompt(length, seed=length), *TURNS]:
        row += turn
        ids = torch.tensor([row])
        prompt = ids[:, cache.get_seq_length() :] if only_new else ids
        settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        out = model.generate(prompt, attention_mask=torch.ones_like(ids), cache=cache, **settings)
        answer = out.sequences[0, prompt.shape[1] :].tolist()
        if not cut:
            cut = dict.fromkeys(streaming(cache)[0], len(row))
        assert streaming(cache) == [frozenset(cut)]
        steps = slice(len(row) - 1, len(row) + 4)
        row += answer
        exact, plain = (r.run(row, cut_at=cut, **WINDOW).logits[steps] for r in (references.exact, references.plain))
        ref.assert_as_close_as_plain_torch(torch.stack(out.logits, 1)[0], exact, plain, what=f"turn of {len(turn)}")
        assert cache.get_seq_length() == len(row) - 1  # the last token was sampled and not fed
    assert len(cut) == 3
    uncut = references.exact.run(row).logits[steps]
    assert (uncut - exact).abs().amax(-1).median() > 1e-3, "the cut hardly moves these logits: this tests nothing"
