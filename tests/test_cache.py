"""``LightTransferCache``: pages and bytes, what the report tells, forwards by hand, several turns on one cache."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from typing import Any

import hybrid_runs as runs
import pytest
import reference_model as ref
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, References, Run
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer.cache import LightTransferCache
from lighttransfer.paging.pool import KVPool

SETTINGS = {**WINDOW, "n_last": N_LAST}
PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 39))]
PAGE = 4
N_LAYERS = 6


def enabled(n_layers: int = N_LAYERS, **settings: object) -> tuple[PreTrainedModel, References]:
    model = tiny_models.build(tiny_models.llama(num_hidden_layers=n_layers))
    references = References(model)
    lighttransfer.enable(model, **{**SETTINGS, **settings})
    return model, references


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def named_pages(cache: LightTransferCache) -> int:
    """Distinct pages that some block table names: counted from the tables, not from the pool's own books."""
    named: set[int] = set()
    for layer in cache.layers:
        if layer.is_initialized:
            table = layer.blocks.flush()
            named.update(table[table >= 0].tolist())
    return len(named)


def only_pool(cache: LightTransferCache) -> KVPool:
    (pool,) = cache.pools.values()
    return pool


@torch.no_grad()
def forward(model: PreTrainedModel, ids: list[int], cache: LightTransferCache) -> torch.Tensor:
    """One unpadded row through the model by hand; ``[S, V]``."""
    return model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0]


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: list[int], answer: list[int], cache: LightTransferCache) -> Run:
    """Prefill and one forward per token of ``answer``, without generate."""
    logits = [forward(model, prompt, cache)[-1]]
    logits += [forward(model, [token], cache)[-1] for token in answer]
    return Run([[*prompt, *answer, 0]], [len(prompt)], torch.stack(logits)[None], cache)


@pytest.mark.parametrize("n_full", [0, 1, 3, 5])
def test_prefill_never_holds_more_than_one_layer_beyond_the_full_ones(n_full: int) -> None:
    model, _ = enabled(full_layers=n_full, page_size=PAGE)
    cache = LightTransferCache(model.config)
    seen = []

    def sample(*_: object) -> None:
        seen.append(named_pages(cache))
        assert only_pool(cache).n_used == seen[-1], "the pool counts other pages than the block tables name"

    hooks = [layer.register_forward_hook(sample) for layer in model.model.layers]
    ids, mask = tiny_models.left_pad(PROMPTS)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()

    whole = sum(pages(len(prompt)) for prompt in PROMPTS)
    ring = len(PROMPTS) * pages(WINDOW_SIZE)
    n_cut = [max(0, layer + 1 - n_full) for layer in range(N_LAYERS)]
    assert seen == [min(n_full, layer + 1) * whole + n_cut[layer] * ring for layer in range(N_LAYERS)]

    # Within a layer: those held, the one that arrives, and the rings of those already cut. On the books and in storage.
    pool = only_pool(cache)
    peak = max(min(n_full + 1, layer + 1) * whole + max(0, layer - n_full) * ring for layer in range(N_LAYERS))
    assert pool.peak_bytes_in_use <= peak * pool.page_bytes
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in (pool.k, pool.v)}
    assert sum(storages.values()) <= peak * pool.page_bytes
    assert pool.peak_storage_bytes <= peak * pool.page_bytes
    assert cache.report().peak_storage_bytes == pool.peak_storage_bytes


@pytest.mark.parametrize("n_full", [0, 2, 6])
@pytest.mark.parametrize("length", [3, WINDOW_SIZE, WINDOW_SIZE + 1, 47])
def test_final_bytes(n_full: int, length: int) -> None:
    model, _ = enabled(policy="first", full_layers=n_full, page_size=PAGE)
    cache = LightTransferCache(model.config)
    forward(model, tiny_models.prompt(length, seed=1), cache)
    kept = n_full * pages(length) + (N_LAYERS - n_full) * pages(min(length, WINDOW_SIZE))
    assert named_pages(cache) == only_pool(cache).n_used == kept
    assert only_pool(cache).bytes_in_use == kept * PAGE * 2 * 2 * 16 * 4  # tokens, sides, KV heads, head_dim, float32


def test_report_tells_what_happened() -> None:
    model, references = enabled(full_layers=2, page_size=PAGE)
    expected = [references.choice(prompt, rule="lazy_ratio", n_full=2) for prompt in PROMPTS]
    run = runs.generate(model, PROMPTS, 9)
    report = run.cache.report()
    assert (report.policy, report.n_layers, report.competing_layers) == ("lazy_ratio", N_LAYERS, list(range(N_LAYERS)))
    assert (report.n_sink, report.n_recent, report.n_last) == (WINDOW["n_sink"], WINDOW["n_recent"], N_LAST)
    token = 2 * 2 * 16 * 4  # sides, KV heads, head_dim, float32
    for row, (request, choice, prompt) in enumerate(zip(report.requests, expected, PROMPTS, strict=True)):
        runs.assert_chosen(run.cache, row, choice)
        assert request.length == len(prompt) + 8  # the last token was sampled and not fed
        held = (2 * pages(request.length) + 4 * pages(WINDOW_SIZE)) * PAGE * token
        whole = N_LAYERS * pages(request.length) * PAGE * token
        assert (request.bytes_held, request.bytes_full, request.bytes_freed) == (held, whole, whole - held)
        assert held <= request.peak_bytes <= held + pages(len(prompt)) * PAGE * token
    assert report.bytes_in_use == sum(request.bytes_held for request in report.requests)
    assert report.bytes_in_use == named_pages(run.cache) * PAGE * token
    assert report.bytes_in_use <= report.storage_bytes <= report.peak_storage_bytes
    values = json.loads(report.to_json())
    assert values["requests"][0]["streaming_layers"] == report.requests[0].streaming_layers


def test_logical_lengths() -> None:
    model, _ = enabled(full_layers=0)
    cache = LightTransferCache(model.config)
    assert cache.get_seq_length() == 0
    forward(model, PROMPTS[0], cache)
    forward(model, [5], cache)
    forward(model, [6, 7, 8], cache)
    assert [cache.get_seq_length(layer) for layer in range(N_LAYERS)] == [51] * N_LAYERS
    assert cache.get_mask_sizes(4, 0) == (55, 0)


def test_forwards_by_hand_equal_the_reference() -> None:
    model, references = enabled(full_layers=2)
    answer = tiny_models.prompt(3 * WINDOW_SIZE, seed=8)
    run = teacher_forced(model, PROMPTS[0], answer, LightTransferCache(model.config))
    references.check(run, runs.cuts_after_prefill(run))


def test_reset_forgets_everything() -> None:
    model, _ = enabled(full_layers=2)
    cache = LightTransferCache(model.config)
    first = teacher_forced(model, PROMPTS[0], [3, 4, 5], cache).logits
    teacher_forced(model, PROMPTS[1], [3, 4, 5], LightTransferCache(model.config))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(teacher_forced(model, PROMPTS[0], [3, 4, 5], cache).logits, first)


def test_a_copied_cache_goes_its_own_way() -> None:
    model, references = enabled(full_layers=2)
    answers = [tiny_models.prompt(12, seed=seed) for seed in (11, 12)]
    cache = LightTransferCache(model.config)
    first = forward(model, PROMPTS[0], cache)[-1]
    for answer, own in zip(answers, (copy.deepcopy(cache), cache), strict=True):
        logits = [first, *(forward(model, [token], own)[-1] for token in answer)]
        run = Run([[*PROMPTS[0], *answer, 0]], [len(PROMPTS[0])], torch.stack(logits)[None], own)
        references.check(run, runs.cuts_after_prefill(run))


def test_a_cache_dies_with_its_request() -> None:
    """Nothing in the model, the package or the cache itself keeps the pages alive, not even until gc runs."""
    model, _ = enabled(full_layers=2)
    gc.disable()
    try:
        for _ in range(3):
            run = runs.generate(model, PROMPTS, 4)
            pages_of_run = weakref.ref(only_pool(run.cache))
            del run
            assert pages_of_run() is None
    finally:
        gc.enable()


def test_memory_stays_flat_over_a_long_run() -> None:
    model = tiny_models.build(tiny_models.llama(num_hidden_layers=2))
    references = References(model)
    lighttransfer.enable(model, full_layers=0, page_size=PAGE, **SETTINGS)
    cache = LightTransferCache(model.config)
    forward(model, PROMPTS[0], cache)
    before = (named_pages(cache), only_pool(cache).storage_bytes)
    answer = tiny_models.prompt(600, seed=13)
    logits = torch.stack([forward(model, [token], cache)[-1] for token in answer])
    assert (named_pages(cache), only_pool(cache).storage_bytes) == before
    row, cut = [*PROMPTS[0], *answer], dict.fromkeys((0, 1), len(PROMPTS[0]))
    exact, plain = (
        reference.run(row, cut_at=cut, **WINDOW).logits[len(PROMPTS[0]) :]
        for reference in (references.exact, references.plain)
    )
    ref.assert_as_close_as_plain_torch(logits, exact, plain, what="logits")


def test_decode_steps_read_no_device_value() -> None:
    """A decode step under a mode in which ``.item()`` and its kin raise: what a CUDA graph could not capture."""
    model, _ = enabled(full_layers=2, page_size=64)
    cache = LightTransferCache(model.config)
    forward(model, PROMPTS[0], cache)
    forward(model, [5], cache)
    with NoHostReads():
        forward(model, [6], cache)
        forward(model, [7], cache)
    assert cache.get_seq_length() == len(PROMPTS[0]) + 3


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"a decode step read a value on the host: {func}")
        return func(*args, **(kwargs or {}))
