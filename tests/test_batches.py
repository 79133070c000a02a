"""Rows of one batch: each chooses, answers and ends as if it were alone."""

from __future__ import annotations

import hybrid_runs as runs
import pytest
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, References, Run, streaming

import lighttransfer
from lighttransfer.cache import LightTransferCache

#: Much longer than the window, longer, as long as it, shorter, and a single token.
PROMPTS = [tiny_models.prompt(length, seed=length) for length in (150, 47, 30, WINDOW_SIZE, 5, 1)]
STEPS = 3 * WINDOW_SIZE + 2


@pytest.mark.parametrize("rule", ["lazy_ratio", "nonsink_peak", "output_error"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "gpt_oss"])
def test_a_rows_tokens_and_choice_are_those_of_the_row_alone(name: str, rule: str) -> None:
    model = tiny_models.build(tiny_models.ARCHITECTURES[name]())
    n_last = WINDOW["n_recent"] if rule == "output_error" else N_LAST
    lighttransfer.enable(model, full_layers=2 if name == "llama" else 1, policy=rule, n_last=n_last, **WINDOW)
    batch = runs.generate(model, PROMPTS, STEPS)
    assert len(set(streaming(batch.cache))) > 1, "the rows must differ to test anything"
    for row, prompt in enumerate(PROMPTS):
        alone = runs.generate(model, [prompt], STEPS)
        together, by_itself = batch.cache.report().requests[row], alone.cache.report().requests[0]
        assert by_itself.is_decided
        assert together.streaming_layers == by_itself.streaming_layers
        assert together.scores == pytest.approx(by_itself.scores, rel=1e-5)
        assert (together.length, together.bytes_held) == (by_itself.length, by_itself.bytes_held)
        assert batch.answers[row] == alone.answers[0]
        assert (batch.logits[row] - alone.logits[0]).abs().max() < 5e-5


@torch.no_grad()
def test_rows_that_leave_the_batch_at_different_times_leave_the_others_alone() -> None:
    """As requests end they are taken out of the batch; the rows that stay are the reference's."""
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, full_layers=2, n_last=N_LAST, page_size=4, **WINDOW)
    prompts = PROMPTS[1:4]
    cache = LightTransferCache(model.config)
    ids, mask = tiny_models.left_pad(prompts)
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), cache=cache).logits
    rows, outputs = [list(prompt) for prompt in prompts], [[x] for x in logits[:, -1]]
    stays, cuts = [0, 1, 2], [{}, {}, {}]
    for step in range(STEPS):
        if step in (13, 20):  # the first row that is left ends
            cuts[stays[0]] = dict.fromkeys(streaming(cache)[0], len(prompts[stays[0]]))
            stays = stays[1:]
            cache.batch_select_indices(torch.arange(1, len(stays) + 1))
            runs.assert_books(cache)
        tokens = [(7 * step + 11 * row) % 90 + 2 for row in stays]
        positions = torch.tensor([[len(rows[row])] for row in stays])
        logits = model(torch.tensor(tokens)[:, None], position_ids=positions, cache=cache).logits[:, -1]
        for row, token, values in zip(stays, tokens, logits, strict=True):
            rows[row].append(token)
            outputs[row].append(values)
    cut_at = 2 * WINDOW_SIZE + 1  # the last row's prompt lies inside the window
    cuts[2] = dict.fromkeys(streaming(cache)[0], cut_at)
    assert all(cuts)
    lengths = [len(prompt) for prompt in prompts]
    for row, values in enumerate(outputs):
        run = Run([[*rows[row], 0]], lengths[row : row + 1], torch.stack(values)[None], cache)
        references.check(run, cuts[row : row + 1])
