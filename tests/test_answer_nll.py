"""bench/answer_nll.py keeps the layers that the cache itself would keep, and keeping all of them costs nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny_models
import tiny_tokenizer
import torch

import lighttransfer
from lighttransfer.cache import LightTransferCache
from lighttransfer.cli.prompts import needle_prompt

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
answer_nll = pytest.importorskip("answer_nll", reason="the benches' packages are missing: pip install -e '.[cli]'")


@torch.no_grad()
def test_rules_keep_what_the_cache_keeps_and_all_layers_cost_nothing() -> None:
    tokenizer = tiny_tokenizer.build()
    model = tiny_models.build(tiny_models.llama(vocab_size=len(tokenizer), max_position_embeddings=1024))
    lighttransfer.enable(model, n_sink=2, n_recent=14, n_last=8)
    prompt = needle_prompt(tokenizer, n_tokens=300, depth=0.3, seed=1)
    arms = [(name, n_full) for name in (*answer_nll.SCORED, *answer_nll.FIXED) for n_full in (5, 2)]
    result = answer_nll.rises(model, tokenizer, prompt, arms, 0, lambda: None)
    for name in (*answer_nll.SCORED, *answer_nll.FIXED):
        assert result[f"{name} 5"] == 0
        assert result[f"{name} 2"] != 0

    ids = torch.tensor([prompt.input_ids])
    policy = answer_nll.ScoreAll()
    model(ids, cache=LightTransferCache(model.config, policy=policy, full_layers=4))
    for name in answer_nll.SCORED:
        for n_full in (1, 2, 3):
            cache = LightTransferCache(model.config, policy=name, full_layers=n_full)
            model(ids, cache=cache)
            assert policy.kept(name, n_full) == set(cache.report().requests[0].full_layers)
