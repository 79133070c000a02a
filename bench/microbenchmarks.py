"""Microbenchmarks of every op, by context length, under pytest-benchmark.

  pytest bench/microbenchmarks.py                                 what each call takes, grouped by op
  pytest bench/microbenchmarks.py -k "identify" --lengths 1024 4096 16384
  pytest bench/microbenchmarks.py --benchmark-autosave            and --benchmark-compare to see what a change did

On the GPU where there is one, in bfloat16; else on the CPU, in float32. Llama-3's attention shape, one request. For
ratios that hold on a busy machine use bench/attention.py and bench/decode.py, which time both sides in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lighttransfer import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
N_HEADS, N_KV_HEADS, HEAD_DIM = 32, 8, 128
WINDOW = {"n_sink": 4, "n_recent": 1020}
N_LAST = 32
PAGE_SIZE = 64

Run = Callable[..., None]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.fixture
def run(benchmark: Any, length: int) -> Run:
    """Benchmarks a call, its kernels' time included."""

    def timed(group: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def finished() -> None:
            call(*args, **kwargs)
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        benchmark.group = group
        benchmark.extra_info.update(length=length, device=DEVICE, dtype=str(DTYPE))
        benchmark(finished)

    return timed


@pytest.fixture
def qkv(length: int) -> tuple[torch.Tensor, ...]:
    return random(1, length, N_HEADS, HEAD_DIM), *(random(1, length, N_KV_HEADS, HEAD_DIM) for _ in range(2))


def test_prefill(run: Run, qkv: tuple[torch.Tensor, ...]) -> None:
    run("prefill, and what identification adds", ops.prefill_attn, *qkv)


def test_prefill_identify(run: Run, qkv: tuple[torch.Tensor, ...]) -> None:
    run("prefill, and what identification adds", ops.prefill_attn_lazy, *qkv, n_last=N_LAST, **WINDOW)


def test_identify(run: Run, qkv: tuple[torch.Tensor, ...]) -> None:
    """Constant in the context's length: only kept keys are read."""
    q, k, _ = qkv
    lse = torch.full((1, N_HEADS, N_LAST), 8.0, device=DEVICE)
    run("prefill, and what identification adds", ops.retained_mass, q[:, -N_LAST:], k, lse, **WINDOW)


def test_prefill_streaming(run: Run, qkv: tuple[torch.Tensor, ...]) -> None:
    run("prefill, and what identification adds", ops.prefill_attn, *qkv, **WINDOW)


def cache(length: int) -> dict[str, Any]:
    """A paged cache with room for one row of `length` tokens."""
    n_pages = -(-length // PAGE_SIZE)
    pages = [random(n_pages, PAGE_SIZE, N_KV_HEADS, HEAD_DIM) for _ in range(2)]
    return dict(zip(("k_cache", "v_cache"), pages, strict=True), block_table=int32(*range(n_pages))[None])


def decode(run: Run, length: int, n_recent: int, n_slots: int, **more: Any) -> None:
    q, k, v = random(1, 1, N_HEADS, HEAD_DIM), *(random(1, 1, N_KV_HEADS, HEAD_DIM) for _ in range(2))
    ring = {"n_sink": WINDOW["n_sink"], "n_recent": int32(n_recent)}
    run("decode", ops.streaming_decode, q, k, v, seq_len=int32(length - 1), **ring, **cache(n_slots), **more)


def test_decode_full(run: Run, length: int) -> None:
    decode(run, length, 0, length)


def test_decode_full_measured(run: Run, length: int) -> None:
    decode(run, length, 0, length, mass_n_recent=WINDOW["n_recent"])


def test_decode_ring(run: Run, length: int) -> None:
    decode(run, length, WINDOW["n_recent"], sum(WINDOW.values()))


def test_append(run: Run, length: int) -> None:
    chunk = {name: random(1, length, N_KV_HEADS, HEAD_DIM) for name in ("k", "v")}
    ring = {"n_sink": 4, "n_recent": int32(0)}
    run("moves", ops.append_kv_, **chunk, seq_len=int32(0), **ring, **cache(length))


def test_compact(run: Run, length: int) -> None:
    run("moves", ops.compact_kv_, seq_len=int32(length), **WINDOW, **cache(length))


def test_gather(run: Run, length: int) -> None:
    ring = {"n_sink": 4, "n_recent": int32(0)}
    run("moves", ops.gather_kv, seq_len=int32(length), max_len=length, **ring, **cache(length))
