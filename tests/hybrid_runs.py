"""Runs of an enabled model, and their comparison with the reference model, as the end-to-end tests share them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import reference_model as ref
import tiny_models
import torch
from transformers import PreTrainedModel

from lighttransfer.cache import LightTransferCache

#: The window of most tests: eight kept tokens, small enough that a prompt of 20 outgrows it.
WINDOW = {"n_sink": 2, "n_recent": 6}
N_LAST = 8
WINDOW_SIZE = 8


@dataclass
class Run:
    """What ``generate`` returned for a batch."""

    #: per row: prompt and answer without the padding.
    rows: list[list[int]]
    #: per row: real tokens of the prompt.
    lengths: list[int]
    #: ``[B, steps, V]``; step 0 is the prefill's, step ``s`` follows token ``length + s - 1``.
    logits: torch.Tensor
    cache: LightTransferCache

    @property
    def answers(self) -> list[list[int]]:
        return [row[length:] for row, length in zip(self.rows, self.lengths, strict=True)]


def generate(model: PreTrainedModel, prompts: list[list[int]], steps: int, **kwargs: Any) -> Run:
    """Greedy decoding of exactly ``steps`` tokens for left-padded ``prompts``."""
    ids, mask = tiny_models.left_pad(prompts)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    rows = [row[ids.shape[1] - len(tokens) :].tolist() for row, tokens in zip(out.sequences, prompts, strict=True)]
    return Run(rows, [len(tokens) for tokens in prompts], torch.stack(out.logits, 1), out.cache)


class References:
    """The model in float64, and in its own precision as plain torch computes it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.exact = ref.ReferenceModel(model)
        self.plain = ref.ReferenceModel(model, model.dtype)

    def check(
        self, run: Run, cuts: list[dict[int, int]], *, window: dict[str, int] = WINDOW, factor: float = 2.0
    ) -> None:
        """Every logit of the run is the reference's; ``cuts[row]`` maps a streaming layer to its first cut query.

        The check proves its own worth: where a row was cut, the uncut model's logits must be far outside the tolerance.
        """
        exact, plain, uncut = [], [], []
        for row, length, cut in zip(run.rows, run.lengths, cuts, strict=True):
            steps = slice(length - 1, len(row) - 1)
            exact.append(self.exact.run(row, cut_at=cut, **window).logits[steps])
            plain.append(self.plain.run(row, cut_at=cut, **window).logits[steps])
            uncut.append(self.exact.run(row).logits[steps])
        exact_logits, plain_logits = torch.stack(exact), torch.stack(plain)
        allowed = factor * float((plain_logits - exact_logits).abs().max())
        for row, cut in enumerate(cuts):
            if cut:
                first = min(cut.values()) - run.lengths[row] + 1
                moved = (uncut[row] - exact[row])[first + WINDOW_SIZE :].abs().amax(-1)
                assert float(moved.median()) > 5 * allowed, "the cut hardly moves these logits: this case tests nothing"
        ref.assert_as_close_as_plain_torch(run.logits, exact_logits, plain_logits, what="logits", factor=factor)

    def choice(self, prompt: list[int], *, rule: str, n_full: int, n_last: int = N_LAST) -> ref.Choice:
        """What the rule keeps for ``prompt``; refuses near-ties, where rounding may decide."""
        trace = self.exact.run(prompt)
        choice = ref.choose(trace, len(prompt), rule=rule, n_full=n_full, n_last=n_last, **WINDOW)
        assert choice.gap > 2e-5, f"near-tie ({choice.gap:.1e}): choose another prompt"
        return choice


def cuts_after_prefill(run: Run) -> list[dict[int, int]]:
    """The run's own choice, as the reference takes it: every streaming layer was cut at the prompt's end."""
    return [dict.fromkeys(layers, length) for layers, length in zip(streaming(run.cache), run.lengths, strict=True)]


def streaming(cache: LightTransferCache) -> list[frozenset[int]]:
    """Per request the layers that were cut, as the report tells."""
    return [frozenset(request.streaming_layers) for request in cache.report().requests]


def assert_books(cache: LightTransferCache) -> None:
    """Every page is owned by exactly the block tables that name it, and the pools count what they hold."""
    for pool in cache.pools.values():
        owners: Counter[int] = Counter()
        for layer in cache.attention_layers:
            if layer.is_initialized and layer.pool is pool:
                table = layer.blocks.flush()
                owners.update(table[table >= 0].tolist())
        assert all(pool.owners(page) == owners[page] for page in range(pool.n_pages))
        assert (pool.n_used, pool.n_free) == (len(owners), pool.n_pages - len(owners))
        assert pool.storage_bytes == pool.n_pages * pool.page_bytes


def assert_chosen(cache: LightTransferCache, row: int, choice: ref.Choice) -> None:
    """The row's layers and every score are the reference's: a wrong score may well lead to the right layers."""
    request = cache.report().requests[row]
    assert request.is_decided
    assert (set(request.full_layers), set(request.streaming_layers)) == (choice.full, choice.streaming)
    assert request.scores.keys() == choice.scores.keys()
    for layer, score in choice.scores.items():
        # Masses lie in [0, 1]; an output error may exceed 1, and rounding goes with its size.
        allowed = 5e-6 * max(1.0, score)
        assert abs(request.scores[layer] - score) < allowed, (
            f"layer {layer}: {request.scores[layer]}, reference {score}"
        )
