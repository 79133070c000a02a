"""torch.compile: decode steps in one graph that stays the same, and every way in which ``generate`` compiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import hybrid_runs as runs
import pytest
import tiny_models
import torch
from hybrid_runs import WINDOW_SIZE, streaming
from stepped_requests import LONG, N_STEPS, PAGE, SETTINGS, SHORT, Request, assert_same, stepped
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig, PreTrainedModel

import lighttransfer
from lighttransfer.cache import LightTransferCache

MIXED: dict[str, object] = {"full_layers": 2}
PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 39))]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True):  # code is looked at: it has to be made
        yield
    torch._dynamo.reset()


def compiled_steps(request: Request, backend: str = "eager", n_steps: int = N_STEPS) -> CompileCounterWithBackend:
    """Decodes in one graph (``fullgraph``: a break is an error); returns what was compiled."""
    counter = CompileCounterWithBackend(backend)
    forward = torch.compile(request.forward, backend=counter, fullgraph=True)
    for _ in range(n_steps):
        with request.cache.decode_step():
            logits = forward()
        request.take(logits)
    return counter


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mixtral", "gemma3", "gpt_oss"])
def test_a_decode_step_is_one_graph(architecture: str) -> None:
    request = Request(MIXED, LONG, architecture)
    request.cache.reserve(N_STEPS)
    counter = compiled_steps(request)
    request.cache.reserve(0)
    assert counter.frame_count == 1, "a step was compiled again: at a page boundary, a wrap, or with every length"
    assert all(length > 2 * WINDOW_SIZE for length in request.cache.lengths)
    assert_same(request, stepped(MIXED, LONG, architecture))


def test_without_a_reservation_only_growth_compiles_again() -> None:
    """A table that became wider and a pool that grew are other shapes, after which both are dynamic."""
    request = Request(MIXED, LONG)
    assert compiled_steps(request).frame_count <= 4
    assert_same(request, stepped(MIXED, LONG))


@pytest.mark.parametrize("policy", ["lazy_ratio", "output_error"])
def test_a_deferred_choice_adds_the_step_that_measures(policy: str) -> None:
    settings = {**MIXED, "policy": policy}
    request = Request(settings, SHORT)
    request.cache.reserve(N_STEPS)
    counter = compiled_steps(request)
    request.cache.reserve(0)
    assert counter.frame_count <= 4, "with and without measuring, at most twice each"
    assert_same(request, stepped(settings, SHORT))


def test_a_graph_key_stands_for_one_kind_of_step() -> None:
    """Steps that measure and steps that do not are other graphs, before a deferred choice and after it."""
    request = Request(MIXED, SHORT)
    request.cache.reserve(N_STEPS)
    windows: dict[tuple[int, ...], set[int]] = {}
    for _ in range(N_STEPS):
        with request.cache.decode_step():
            windows.setdefault(request.cache.graph_key, set()).add(request.cache.decoding.mass_n_recent)
            logits = request.forward()
        request.take(logits)
    assert all(len(kinds) == 1 for kinds in windows.values())
    assert set.union(*windows.values()) == {-1, SETTINGS["n_recent"]}


def test_through_aot_autograd() -> None:
    request = Request(MIXED, LONG)
    request.cache.reserve(N_STEPS)
    assert compiled_steps(request, "aot_eager").frame_count == 1
    request.cache.reserve(0)
    assert_same(request, stepped(MIXED, LONG))


@pytest.mark.slow
def test_through_inductor() -> None:
    request = Request(MIXED, LONG)
    request.cache.reserve(N_STEPS)
    forward = torch.compile(request.forward, fullgraph=True)
    with request.cache.decode_step():
        logits, sources = run_and_get_code(forward)
    request.take(logits)
    for _ in range(N_STEPS - 1):
        with request.cache.decode_step():
            logits = forward()
        request.take(logits)
    code = "".join(sources)
    assert n_graphs() == 1
    pool = request.cache.attention_layers[0].pool
    # The ops change the pool in place: a copy of it in every layer would cost more than the step.
    assert re.search(rf"assert_size_stride\(\w+, \({pool.n_pages}, ", code), "the code's names for tensors have changed"
    assert not re.search(rf"empty_strided_cpu\(\(({pool.n_pages}|{pool.k.numel()}), ", code)
    request.cache.reserve(0)
    assert_same(request, stepped(MIXED, LONG))


def test_a_compiled_step_outside_of_decode_step_breaks_the_graph_and_still_works() -> None:
    request = Request(MIXED, LONG)
    forward = torch.compile(request.forward, backend="eager")
    for _ in range(4):
        request.take(forward())
    assert counters["graph_break"], "the host had its part in the middle of the call"
    expected = Request(MIXED, LONG)
    for _ in range(4):
        expected.take(expected.forward())
    assert_same(request, expected)


@torch.no_grad()
def test_attention_without_our_cache_is_one_graph() -> None:
    model = tiny_models.build(tiny_models.llama())
    ids = torch.tensor([LONG[0]])
    expected = model(input_ids=ids, use_cache=False).logits
    lighttransfer.enable(model, **{**SETTINGS, **MIXED})
    got = torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, use_cache=False).logits
    assert torch.equal(got, expected)


# generate.


def enabled() -> PreTrainedModel:
    model = tiny_models.build(tiny_models.llama(num_hidden_layers=3))
    return lighttransfer.enable(model, **{**SETTINGS, "full_layers": 1})


def config(backend: str = "eager", **settings: Any) -> CompileConfig:
    """What a user passes as ``compile_config``, made to count on the CPU, which transformers otherwise leaves alone."""
    compile_config = CompileConfig(backend=backend, mode=None, **settings)
    compile_config._compile_all_devices = True
    return compile_config


def n_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("prompts", [PROMPTS, SHORT])
def test_generate_with_a_compile_config(prompts: list[list[int]]) -> None:
    expected = runs.generate(enabled(), prompts, 24)
    assert all(len(layers) == 2 for layers in streaming(expected.cache)), "a choice has been made, at once or later"
    model = enabled()
    for _ in range(2):
        run = runs.generate(model, prompts, 24, compile_config=config(fullgraph=True))
        assert run.answers == expected.answers
        assert streaming(run.cache) == streaming(expected.cache)
        assert (run.logits - expected.logits).abs().max() < 2e-5
        bytes_held = [[r.bytes_held for r in each.cache.report().requests] for each in (run, expected)]
        assert bytes_held[0] == bytes_held[1]
        assert not run.cache.decoding.is_open
        layer = run.cache.attention_layers[0]
        for tensor in (layer.pool.k, layer.pool.v, layer.blocks.tensor, layer.n_recent, layer.clock.seq_len):
            assert tensor._dynamo_static_input_type == "unguarded", "CUDA graphs would copy it in every step"
    assert 1 <= n_graphs() <= (1 if prompts is PROMPTS else 3), "the second call is the first one's graph"


@torch.no_grad()
@pytest.mark.parametrize("prompts", [PROMPTS, SHORT])
def test_a_pool_for_compiled_steps_has_room_for_the_answer_from_the_start(prompts: list[list[int]]) -> None:
    """What a row needs at most on its way to 1,000 tokens: all layers until its choice is due, one after it."""
    model = enabled()
    cache = LightTransferCache(model.config)
    cache.compile_for(1000)
    ids, mask = tiny_models.left_pad(prompts)
    model(input_ids=ids, attention_mask=mask, cache=cache)
    layer = cache.attention_layers[0]
    assert layer.pool.n_pages == 3 * (1000 // PAGE + 2 * WINDOW_SIZE // PAGE)
    with cache.decode_step():
        key = cache.graph_key
        model(input_ids=torch.ones(3, 1, dtype=torch.int64), cache=cache)
    assert layer.blocks.tensor.shape == (3, 1000 // PAGE)
    with cache.decode_step():
        assert cache.graph_key == key


def test_a_cache_of_ones_own_with_a_compile_config() -> None:
    model = enabled()
    expected = runs.generate(enabled(), PROMPTS, 24)
    cache = LightTransferCache(model.config)
    run = runs.generate(model, PROMPTS, 24, cache=cache, compile_config=config(fullgraph=True))
    assert run.answers == expected.answers
    assert n_graphs() == 1
    assert runs.generate(model, PROMPTS, 4, cache=LightTransferCache(model.config)).answers == [
        answer[:4] for answer in expected.answers
    ]


@pytest.mark.parametrize(
    "mode",
    [
        {"prefill_chunk_size": 7},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
        {"disable_compile": True},
        {"use_cache": False},
    ],
    ids=lambda mode: next(iter(mode)),
)
def test_other_modes_with_a_compile_config(mode: dict[str, Any]) -> None:
    """Chunks are read uncompiled; beams, drafts and no cache at all are not compiled, as with a static cache."""
    prompts = PROMPTS[:1]
    ids = torch.tensor(prompts)
    settings = {"max_new_tokens": 16, "do_sample": False, **mode}
    expected = enabled().generate(ids, **settings)
    assert torch.equal(enabled().generate(ids, **settings, compile_config=config(fullgraph=True)), expected)
    assert n_graphs() == ("prefill_chunk_size" in mode)


def test_on_the_cpu_a_compile_config_alone_compiles_nothing() -> None:
    """transformers compiles on accelerators; what it was asked elsewhere it says and leaves."""
    expected = runs.generate(enabled(), PROMPTS, 8)
    run = runs.generate(enabled(), PROMPTS, 8, compile_config=CompileConfig(backend="no such backend"))
    assert run.answers == expected.answers


def _forward(model: PreTrainedModel, counter: CompileCounterWithBackend) -> None:
    model.forward = torch.compile(model.forward, backend=counter)


def _module(model: PreTrainedModel, counter: CompileCounterWithBackend) -> None:
    model.compile(backend=counter)


def _parts(model: PreTrainedModel, counter: CompileCounterWithBackend) -> None:
    for layer in model.model.layers:
        layer.compile(backend=counter)


@pytest.mark.parametrize("compile_", [_forward, _module, _parts])
def test_generate_of_a_compiled_model(
    compile_: Callable[[PreTrainedModel, CompileCounterWithBackend], None],
) -> None:
    """The prompt is read with graph breaks, decode steps without: generate does the host's part between them."""
    counter = CompileCounterWithBackend("eager")
    expected = runs.generate(enabled(), PROMPTS, 24)
    model = enabled()
    compile_(model, counter)
    first = runs.generate(model, PROMPTS, 3)
    breaks, graphs = sum(counters["graph_break"].values()), counter.frame_count
    assert graphs > 0
    assert [answer[:3] for answer in expected.answers] == first.answers
    run = runs.generate(model, PROMPTS, 24)
    assert run.answers == expected.answers
    assert streaming(run.cache) == streaming(expected.cache)
    assert sum(counters["graph_break"].values()) == breaks, "a decode step broke the graph"
    assert counter.frame_count - graphs <= 4 * len(model.model.layers), "compiled with every step"
