"""Sampling, dtypes, modes and what generate returns: with all layers full the same as transformers, draw for draw."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, References, Run, streaming

import lighttransfer
from lighttransfer.cache import LightTransferCache

LENGTHS = [47, 30, 5]
IDS, MASK = tiny_models.left_pad([tiny_models.prompt(length, seed=length) for length in LENGTHS])
MODES = {"no_grad": nullcontext, "inference_mode": torch.inference_mode}


def sample(model: Any, **settings: Any) -> Any:
    torch.manual_seed(3)
    options = {"do_sample": True, "top_k": 0, "temperature": 0.8, "max_new_tokens": 24, **settings}
    return model.generate(IDS, attention_mask=MASK, return_dict_in_generate=True, output_logits=True, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sampling_draws_what_transformers_draws(dtype: torch.dtype, mode: str) -> None:
    model = tiny_models.build(tiny_models.llama(), dtype=dtype)
    references = References(model)
    expected = sample(model)
    lighttransfer.enable(model, full_layers=1.0, n_last=N_LAST, **WINDOW)
    with MODES[mode]():
        out = sample(model)
    assert type(out) is type(expected)
    assert isinstance(out.past_key_values, LightTransferCache)
    # In half precision two roundings of one logit may draw different tokens: there the logits are compared.
    assert dtype != torch.float32 or torch.equal(out.sequences, expected.sequences)
    rows = [row[IDS.shape[1] - length :].tolist() for row, length in zip(out.sequences, LENGTHS, strict=True)]
    references.check(Run(rows, LENGTHS, torch.stack(out.logits, 1), out.past_key_values), [{}] * len(rows))
    assert [x.shape for x in out.logits] == [x.shape for x in expected.logits]
    assert all(x.dtype is y.dtype for x, y in zip(out.logits, expected.logits, strict=True))


def test_a_cache_filled_in_inference_mode_goes_on_outside() -> None:
    model = tiny_models.build(tiny_models.llama())
    lighttransfer.enable(model, full_layers=2, n_last=N_LAST, **WINDOW)
    cache = LightTransferCache(model.config)
    with torch.inference_mode():
        first = model.generate(IDS[:1], cache=cache, max_new_tokens=6, do_sample=False)
        copied = copy.deepcopy(cache)
    assert streaming(cache)[0]
    whole = model.generate(IDS[:1], max_new_tokens=16, do_sample=False)
    for each in (cache, copied):
        assert torch.equal(model.generate(first, cache=each, max_new_tokens=10, do_sample=False), whole)
        each.batch_repeat_interleave(2)
        each.reset()
