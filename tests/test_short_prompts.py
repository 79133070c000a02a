"""A short prompt and a long answer: the full model until the choice falls, the chosen layers from then on."""

from __future__ import annotations

import hybrid_runs as runs
import pytest
import reference_model as ref
import tiny_models
import torch
from hybrid_runs import References, Run, streaming

import lighttransfer

WINDOW = {"n_sink": 4, "n_recent": 60}
SIZE, N_LAST, N_FULL, PAGE = 64, 16, 2, 8
PROMPT = tiny_models.prompt(50, seed=2)


@pytest.mark.parametrize("rule", ["lazy_ratio", "nonsink_peak", "output_error"])
def test_fifty_tokens_that_generate_four_windows_end_with_the_full_layers_alone(rule: str) -> None:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    full = runs.generate(model, [PROMPT], 2 * SIZE + 1 - 50)  # transformers' own cache
    lighttransfer.enable(model, full_layers=N_FULL, policy=rule, n_last=N_LAST, page_size=PAGE, **WINDOW)
    run = runs.generate(model, [PROMPT], 4 * SIZE)

    cut_at = 2 * SIZE + 1
    assert run.rows[0][: full.logits.shape[1] + 50] == full.rows[0], "before the choice the tokens are the full model's"
    trace = references.exact.run(run.rows[0][:cut_at])
    # A decode step's mass is split by its own window; its output is compared with what a cut would leave now.
    rolling = rule != "output_error"
    choice = ref.choose(trace, cut_at, rule=rule, n_full=N_FULL, n_last=N_LAST, rolling=rolling, **WINDOW)
    assert choice.gap > 2e-5
    runs.assert_chosen(run.cache, 0, choice)
    assert len(streaming(run.cache)[0]) == 5 - N_FULL
    references.check(run, [dict.fromkeys(choice.streaming, cut_at)], window=WINDOW)

    length = 50 + 4 * SIZE - 1  # the last token was sampled and not fed
    (pool,) = run.cache.pools.values()
    assert pool.n_used == N_FULL * -(-length // PAGE) + (5 - N_FULL) * -(-SIZE // PAGE)
    assert pool.bytes_in_use == pool.n_used * pool.page_bytes == run.cache.report().bytes_in_use


@torch.no_grad()
def test_a_later_setting_puts_the_choice_off_further() -> None:
    model = tiny_models.build(tiny_models.llama())
    lighttransfer.enable(model, full_layers=N_FULL, n_last=N_LAST, defer_windows=3.0, **WINDOW)
    run: Run = runs.generate(model, [PROMPT], 3 * SIZE - 50 + 1)
    assert not run.cache.report().requests[0].is_decided
    assert run.cache.get_seq_length() == 3 * SIZE
    run = runs.generate(model, [PROMPT], 3 * SIZE - 50 + 2)
    assert run.cache.report().requests[0].is_decided
