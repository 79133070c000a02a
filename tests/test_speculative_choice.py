"""Choices that fall while drafts are verified: they rest on accepted tokens, and come where plain decoding has them."""

from __future__ import annotations

from typing import Any

import hybrid_runs as runs
import pytest
import reference_model as ref
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, References, Run, streaming
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer import LightTransferCache

SETTINGS = {**WINDOW, "n_last": N_LAST, "full_layers": 2, "page_size": 4}
DUE = 2 * WINDOW_SIZE + 1


def enabled(**settings: object) -> tuple[PreTrainedModel, References]:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, **{**SETTINGS, **settings})
    return model, references


SPECULATION: dict[str, Any] = {
    "prompt_lookup": lambda: {"prompt_lookup_num_tokens": 5},
    "poor_assistant": lambda: {"assistant_model": tiny_models.build(tiny_models.llama(), seed=1)},
    "good_assistant": lambda: {"assistant_model": tiny_models.build(tiny_models.llama())},
}


@pytest.mark.parametrize("mode", SPECULATION)
@pytest.mark.parametrize("length", [1, 5, WINDOW_SIZE])
def test_a_deferred_choice_comes_under_speculation_too(mode: str, length: int) -> None:
    """The greedy tokens, outright: the choice, its scores and its place are those of plain decoding."""
    model, references = enabled()
    ids = torch.tensor([tiny_models.prompt(length, seed=40)])
    options = {"max_new_tokens": 5 * WINDOW_SIZE, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids, **options)
    (cut,) = streaming(plain.cache)
    assert len(cut) == 3
    fast = model.generate(ids, **options, **SPECULATION[mode]())
    assert torch.equal(fast.sequences, plain.sequences)
    uncut = references.exact.generate(ids, cut_at=[{}], **WINDOW, max_new_tokens=5 * WINDOW_SIZE, do_sample=False)
    assert not torch.equal(plain.sequences, uncut), "the cut must matter to test anything"
    assert streaming(fast.cache) == [cut]
    scores = [out.cache.report().requests[0].scores for out in (plain, fast)]
    assert scores[0].keys() == scores[1].keys()
    assert all(abs(scores[0][layer] - scores[1][layer]) < 5e-6 for layer in scores[0])


@pytest.mark.parametrize("mode", SPECULATION)
def test_layers_that_memory_asks_for_later_go_under_speculation_too(mode: str) -> None:
    page_bytes = 4 * 2 * 2 * 16 * 4  # tokens, sides, KV heads, head_dim, float32
    model, _ = enabled(full_layers=3, reselect_every=6, reselect_bytes=44 * page_bytes)
    ids = torch.tensor([tiny_models.prompt(47, seed=43)])
    options = {"max_new_tokens": 50, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids, **options)
    assert len(streaming(plain.cache)[0]) == 4
    fast = model.generate(ids, **options, **SPECULATION[mode]())
    assert torch.equal(fast.sequences, plain.sequences)
    assert streaming(fast.cache) == streaming(plain.cache)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["lazy_ratio", "nonsink_peak", "output_error"])
@pytest.mark.parametrize("calls", [[(3, 2), (3, 0), (5, 3), (4, 2), (6, 4), (5, 1), (4, 4), (3, 0)], [(1, 0)] * 20])
def test_the_choice_rests_on_the_accepted_tokens(rule: str, calls: list[tuple[int, int]]) -> None:
    """Drafts by hand: of each call's tokens the last ones are wrong and are taken back."""
    n_last = 6 if rule == "output_error" else N_LAST  # its small attention call must see every kept key
    model, references = enabled(policy=rule, n_last=n_last)
    row, cache = tiny_models.prompt(5, seed=41), LightTransferCache(model.config)
    truth = tiny_models.prompt(60, seed=42)

    def feed(tokens: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]

    logits, cut_at = [feed(row)[-1]], None
    cache.activate_past_recording()
    for n, n_wrong in calls:
        right, truth = truth[: n - n_wrong], truth[n - n_wrong :]
        logits += list(feed([*right, *(token + 7 for token in truth[:n_wrong])])[: n - n_wrong])
        assert cut_at is not None or not streaming(cache)[0], "chosen before it was known which tokens stay"
        cache.crop(-n_wrong)
        row += right
        assert cache.get_seq_length() == len(row)
        if cut_at is None and streaming(cache)[0]:
            cut_at = len(row)
    assert cut_at is not None
    assert cut_at >= DUE
    choice = ref.choose(
        references.exact.run(row[:cut_at]),
        cut_at,
        rule=rule,
        n_full=2,
        n_last=n_last,
        rolling=rule != "output_error",
        **WINDOW,
    )
    assert choice.gap > 2e-5
    runs.assert_chosen(cache, 0, choice)
    for token in truth[: 2 * WINDOW_SIZE]:
        logits += list(feed([token]))
        row.append(token)
    run = Run([[*row, 0]], [5], torch.stack(logits)[None], cache)
    references.check(run, [dict.fromkeys(choice.streaming, cut_at)])


@pytest.mark.parametrize("mode", SPECULATION)
@pytest.mark.parametrize("settings", [{}, {"full_layers": 3, "reselect_turns": True, "reselect_bytes": 50 * 1024}])
def test_a_later_turns_prompt_chooses_under_speculation_too(mode: str, settings: dict[str, Any]) -> None:
    """A short prompt's choice that falls at the second turn, and a re-selection there."""
    model, _ = enabled(**settings)
    prompt = tiny_models.prompt(47 if settings else 5, seed=44)
    turn = tiny_models.prompt(30, seed=45)

    def answer(**speculation: Any) -> Any:
        cache = LightTransferCache(model.config)
        options = {"do_sample": False, "cache": cache, "return_dict_in_generate": True}
        first = model.generate(torch.tensor([prompt]), max_new_tokens=3, **options).sequences
        assert len(streaming(cache)[0]) == (2 if settings else 0)
        ids = torch.tensor([[int(first[0, -1]), *turn]])  # the new tokens alone: assisted decoding takes no others
        mask = torch.ones(1, first.shape[1] + 30, dtype=torch.long)
        return model.generate(ids, attention_mask=mask, max_new_tokens=40, **options, **speculation)

    plain, fast = answer(), answer(**SPECULATION[mode]())
    assert len(streaming(plain.cache)[0]) == 3
    assert torch.equal(fast.sequences, plain.sequences)
    assert streaming(fast.cache) == streaming(plain.cache)
    scores = [out.cache.report().requests[0].scores for out in (plain, fast)]
    assert all(abs(scores[0][layer] - scores[1][layer]) < 5e-6 for layer in scores[0])
