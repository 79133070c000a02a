"""Rows that share a prompt: beams and several answers hold its pages once, until they write."""

from __future__ import annotations

import hybrid_runs as runs
import pytest
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, streaming

import lighttransfer
from lighttransfer.cache import LightTransferCache

PAGE, N_FULL, N_LAYERS = 4, 2, 5
PROMPT = tiny_models.prompt(46, seed=21)  # 11 whole pages and two tokens of a twelfth


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


@torch.no_grad()
@pytest.mark.parametrize("n_beams", [2, 4])
def test_beams_hold_the_prompts_pages_once_and_copy_what_they_write(n_beams: int) -> None:
    model = lighttransfer.enable(
        tiny_models.build(tiny_models.llama()), full_layers=N_FULL, n_last=N_LAST, page_size=PAGE, **WINDOW
    )
    cache = LightTransferCache(model.config)
    model(torch.tensor([PROMPT]), cache=cache)
    (pool,) = cache.pools.values()
    whole, ring = N_FULL * pages(len(PROMPT)), (N_LAYERS - N_FULL) * pages(WINDOW_SIZE)
    assert pool.n_used == whole + ring
    cache.batch_repeat_interleave(n_beams)
    assert pool.n_used == whole + ring
    assert streaming(cache) == streaming(cache)[:1] * n_beams

    model(torch.arange(5, 5 + n_beams)[:, None], position_ids=torch.full((n_beams, 1), len(PROMPT)), cache=cache)
    # Each beam has its own last page of every full layer, and of every ring the page that it wrote to.
    assert pool.n_used == whole + ring + (n_beams - 1) * N_LAYERS
    runs.assert_books(cache)
    cache.reorder_cache(torch.zeros(n_beams, dtype=torch.long))  # all go on from the first beam
    assert pool.n_used == whole + ring
    runs.assert_books(cache)
    assert cache.report().bytes_in_use == (whole + ring) * pool.page_bytes


def test_beams_with_all_layers_full_are_transformers_beams() -> None:
    model = tiny_models.build(tiny_models.llama())
    ids = torch.tensor([PROMPT, tiny_models.prompt(46, seed=22)])
    settings = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **settings)
    lighttransfer.enable(model, full_layers=1.0, n_last=N_LAST, page_size=PAGE, **WINDOW)
    assert torch.equal(model.generate(ids, **settings), expected)
