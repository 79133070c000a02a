"""Prompts in chunks: whatever the chunks, the logits and the choice of the prompt read at once."""

from __future__ import annotations

import hybrid_runs as runs
import pytest
import reference_model as ref
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, References, Run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import lighttransfer
from lighttransfer.cache import LightTransferCache

PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 9))]
N_COLUMNS = 47
#: Sizes of the chunks of 47 columns.
chunkings = st.lists(st.integers(1, 46), min_size=1).map(
    lambda sizes: [min(size, max(0, N_COLUMNS - sum(sizes[:at]))) for at, size in enumerate([*sizes, N_COLUMNS])]
)


@pytest.mark.parametrize("rule", ["lazy_ratio", "nonsink_peak", "output_error"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_any_chunking_gives_the_logits_and_the_choice_of_the_whole(name: str, rule: str) -> None:
    """Padded rows of three lengths: a chunk may hold nothing but padding for one and the prompt's end for another."""
    model = tiny_models.build(tiny_models.ARCHITECTURES[name]())
    references = References(model)
    n_last = WINDOW["n_recent"] if rule == "output_error" else N_LAST
    n_full = 2 if name == "llama" else 1
    choices = [references.choice(prompt, rule=rule, n_full=n_full, n_last=n_last) for prompt in PROMPTS]
    exact, plain = ([r.run(prompt).logits for prompt in PROMPTS] for r in (references.exact, references.plain))
    lighttransfer.enable(model, full_layers=n_full, policy=rule, n_last=n_last, **WINDOW)
    ids, mask = tiny_models.left_pad(PROMPTS)
    positions = (mask.cumsum(1) - 1).clamp_min(0)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
    @given(chunkings)
    @example([44, 3])  # the last queries come from two chunks
    @torch.no_grad()
    def check(sizes: list[int]) -> None:
        cache, done, logits = LightTransferCache(model.config, prompt_length=N_COLUMNS), 0, []
        for size in filter(None, sizes):
            end = done + size
            assert not any(runs.streaming(cache)), "a layer was cut before the prompt's end"
            inputs = {"input_ids": ids[:, done:end], "position_ids": positions[:, done:end]}
            logits.append(model(**inputs, attention_mask=mask[:, :end], cache=cache).logits)
            done = end
        assert done == N_COLUMNS
        for row, (prompt, choice) in enumerate(zip(PROMPTS, choices, strict=True)):
            actual = torch.cat(logits, 1)[row, N_COLUMNS - len(prompt) :]
            ref.assert_as_close_as_plain_torch(actual, exact[row], plain[row], what=f"row {row} of chunks {sizes}")
            runs.assert_chosen(cache, row, choice)

    check()


@torch.no_grad()
def test_decode_after_chunks_is_decode_after_the_whole() -> None:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, full_layers=2, n_last=N_LAST, **WINDOW)
    cache = LightTransferCache(model.config)
    cache.begin_prefill()
    for done in range(0, 47, 11):
        logits = model(torch.tensor([PROMPTS[0][done : done + 11]]), cache=cache).logits
    cache.end_prefill()
    answer = tiny_models.prompt(20, seed=6)
    steps = [logits[0, -1], *(model(torch.tensor([[token]]), cache=cache).logits[0, -1] for token in answer)]
    run = Run([[*PROMPTS[0], *answer, 0]], [47], torch.stack(steps)[None], cache)
    references.check(run, runs.cuts_after_prefill(run))
