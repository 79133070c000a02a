"""Scores that are used one layer late, as on a GPU: nothing but the peak may change, and that by one layer."""

from __future__ import annotations

import pytest
import tiny_models
import torch

import lighttransfer
from lighttransfer.cache import prompt_choice

PROMPTS = torch.tensor([tiny_models.prompt(40, seed=1), tiny_models.prompt(40, seed=2)])
PADDING = torch.tensor([[0] * 11 + [1] * 29, [1] * 40])


class SlowReading:
    """Scores that are there only when they are waited for."""

    waits = 0

    def __init__(self, scores: torch.Tensor) -> None:
        self._scores = scores.clone()

    def wait(self) -> list[float]:
        SlowReading.waits += 1
        return self._scores.tolist()


@pytest.mark.parametrize("policy", ["lazy_ratio", "nonsink_peak"])
@pytest.mark.parametrize("n_full", [0, 1, 3])
def test_late_scores_change_nothing_but_the_peak(monkeypatch: pytest.MonkeyPatch, policy: str, n_full: int) -> None:
    model = tiny_models.build(tiny_models.llama())
    settings = {"full_layers": n_full, "policy": policy, "n_sink": 2, "n_recent": 6, "n_last": 4, "page_size": 4}
    lighttransfer.enable(model, **settings)
    options = {"attention_mask": PADDING, "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    at_once = model.generate(PROMPTS, **options)
    monkeypatch.setattr(prompt_choice, "reads_late", lambda scores: True)
    monkeypatch.setattr(prompt_choice, "Reading", SlowReading)
    SlowReading.waits = 0
    late = model.generate(PROMPTS, **options)
    assert SlowReading.waits == 5
    assert torch.equal(late.sequences, at_once.sequences)
    reports = [out.cache.report() for out in (at_once, late)]
    assert reports[0].requests[0].scores == reports[1].requests[0].scores
    for a, b in zip(*(report.requests for report in reports), strict=True):
        assert a.streaming_layers == b.streaming_layers
        assert a.bytes_held == b.bytes_held
    cache = lighttransfer.LightTransferCache(model.config)
    with torch.no_grad():
        model(input_ids=PROMPTS, attention_mask=PADDING, cache=cache)
    (pool,) = cache.pools.values()
    full, ring = (sum(pool.pages_for(min(n, size)) for n in (29, 40)) for size in (40, 8))
    assert pool.peak_bytes_in_use == pool.page_bytes * ((n_full + 1) * full + (5 - n_full - 1) * ring)
    assert pool.bytes_in_use == pool.page_bytes * (n_full * full + (5 - n_full) * ring)
