"""Two hundred requests in a row, of every kind that generate knows: each gives back all that it took."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable

import hybrid_runs as runs
import pytest
import tiny_models
import torch
from hybrid_runs import WINDOW
from test_long_runs import live_bytes
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer.cache import LightTransferCache

N_LAYERS = 3
SETTINGS = {**WINDOW, "full_layers": 1, "n_last": 4, "page_size": 4}
#: Tokens of the prompts of one request: fewer than the window's eight, more, and both in one batch.
BATCHES = [(30,), (5,), (19, 40, 3), (8, 9), (27, 11, 33, 14), (1, 6)]

Request = Callable[[PreTrainedModel, LightTransferCache, list[list[int]]], None]


class Failure(Exception):
    """What a request that raises raises."""


def generate(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]], **kwargs: object) -> None:
    ids, mask = tiny_models.left_pad(prompts)
    model.generate(ids, attention_mask=mask, cache=cache, **{"max_new_tokens": 9, "do_sample": False, **kwargs})


def greedy(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
    generate(model, cache, prompts, max_new_tokens=18)


def ended_early(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
    """Any of a fifth of all tokens ends a row."""
    generate(model, cache, prompts, eos_token_id=list(range(2, 20)))


def beams(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
    generate(model, cache, prompts, num_beams=3, num_return_sequences=2)


def sampled(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
    generate(model, cache, prompts, do_sample=True, num_return_sequences=2)


def in_chunks(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
    generate(model, cache, prompts, prefill_chunk_size=7)


def drafted(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
    generate(model, cache, [prompts[0] * 4], prompt_lookup_num_tokens=4)


def in_turns(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
    generate(model, cache, prompts[:1])
    turn = tiny_models.prompt(cache.get_seq_length() + 13, seed=3)
    generate(model, cache, [turn])


def rows_leave(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
    """Rows whose request is done leave the batch while the others go on."""
    generate(model, cache, prompts)
    for left in range(len(prompts) - 1, 0, -1):
        cache.batch_select_indices(torch.arange(left))
        tokens, at = torch.full((left, 1), 5), torch.tensor([[length] for length in cache.lengths])
        with torch.no_grad():
            model(input_ids=tokens, position_ids=at, cache=cache)
        runs.assert_books(cache)


def raises_at(layer: int, call: int) -> Request:
    """The ``call``-th call of the model (0: the prompt) fails in ``layer``, when the layers before it have run."""

    def request(model: PreTrainedModel, cache: LightTransferCache, prompts: list[list[int]]) -> None:
        calls = itertools.count()

        def fail(*_: object) -> None:
            if next(calls) == call:
                raise Failure

        hook = model.model.layers[layer].mlp.register_forward_hook(fail)
        try:
            with pytest.raises(Failure):
                generate(model, cache, prompts)
        finally:
            hook.remove()

    return request


REQUESTS: list[Request] = [
    greedy,
    ended_early,
    beams,
    raises_at(layer=1, call=0),
    sampled,
    in_chunks,
    drafted,
    raises_at(layer=2, call=5),
    in_turns,
    rows_leave,
]
N_REQUESTS = 200


@pytest.mark.parametrize("reuses_cache", [True, False])
def test_every_request_gives_back_what_it_took(reuses_cache: bool) -> None:
    """One cache that is reset between requests, or a cache for each that dies with it."""
    model = lighttransfer.enable(tiny_models.build(tiny_models.llama(num_hidden_layers=N_LAYERS)), **SETTINGS)
    shared = LightTransferCache(model.config)
    before, took = None, {}
    kinds = list(itertools.product(REQUESTS, BATCHES))
    torch.manual_seed(0)
    for number in range(N_REQUESTS):
        request, lengths = kinds[number % len(kinds)]
        prompts = [tiny_models.prompt(length, seed=length) for length in lengths]
        cache = shared if reuses_cache else LightTransferCache(model.config)
        request(model, cache, prompts)
        (pool,) = cache.pools.values()
        assert pool.n_used > 0
        runs.assert_books(cache)
        if request is not sampled and request is not rows_leave:  # what these take depends on chance, or on the rest
            assert took.setdefault((request, lengths), pool.peak_storage_bytes) == pool.peak_storage_bytes
        cache.reset()
        assert (pool.n_used, pool.n_free) == (0, pool.n_pages)
        assert cache.get_seq_length() == 0
        alive = weakref.ref(pool)
        del pool, cache
        gc.disable()
        assert alive() is None, f"request {number} left its pages behind"
        gc.enable()
        if number % 10 == 9:
            now = live_bytes()
            before = before or now
            assert now == before, f"request {number} left tensors behind"
