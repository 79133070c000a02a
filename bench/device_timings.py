"""Timings on a GPU, as ratios measured side by side: prefill against torch's SDPA, identification, decode.

python bench/device_timings.py [--json FILE] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lighttransfer import ops

WINDOW = {"n_sink": 4, "n_recent": 1020}
N_LAST = 32


def milliseconds(calls: dict[str, Callable[[], Any]], device: str, rounds: int = 15) -> dict[str, float]:
    """The median of each call, the calls taking turns in every round, so that clocks and heat meet all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 3):
        for name, call in calls.items():
            if device == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                end.synchronize()
                elapsed = begin.elapsed_time(end)
            else:
                start = time.perf_counter()
                call()
                elapsed = (time.perf_counter() - start) * 1e3
            if i >= 3:
                times[name].append(elapsed)
    return {name: statistics.median(t) for name, t in times.items()}


def qkv(batch: int, length: int, heads: int, kv_heads: int, dim: int, device: str) -> list[Tensor]:
    return [
        torch.randn(batch, length, h, dim, dtype=torch.bfloat16, device=device) for h in (heads, kv_heads, kv_heads)
    ]


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)

    return call


def prefill(device: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Causal prefill, 32 query and 8 KV heads: ours, with identification, and torch's kernels."""
    rows = []
    for dim in (64, 128):
        for length in lengths:
            q, k, v = qkv(1, length, 32, 8, dim, device)
            calls: dict[str, Callable[[], Any]] = {
                "prefill_attn": lambda q=q, k=k, v=v: ops.prefill_attn(q, k, v),
                "prefill_attn_lazy": lambda q=q, k=k, v=v: ops.prefill_attn_lazy(q, k, v, n_last=N_LAST, **WINDOW),
                "streaming mask": lambda q=q, k=k, v=v: ops.prefill_attn(q, k, v, **WINDOW),
            }
            for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
                call = sdpa(backend, q, k, v)
                try:
                    call()
                except RuntimeError:  # this torch or GPU has no such kernel
                    continue
                calls[f"sdpa {name}"] = call
            times = milliseconds(calls, device)
            flops = 4 * 32 * dim * length * length / 2
            rows.append(
                {"head_dim": dim, "length": length, "ms": times}
                | {"tflops": {name: flops / t / 1e9 for name, t in times.items() if name != "streaming mask"}}
                | {"identification_overhead": times["prefill_attn_lazy"] / times["prefill_attn"] - 1}
            )
            print(rows[-1], flush=True)
    return rows


def beside_prefill(
    name: str, prepare: Callable[..., Callable[[], Any]], device: str, lengths: list[int], heads: int, rounds: int = 15
) -> list[dict[str, Any]]:
    """The call that ``prepare(q, k, v)`` makes, beside prefill_attn over the same, as the context grows; four query
    heads share a KV head of 128."""
    rows = []
    for length in lengths:
        q, k, v = qkv(1, length, heads, heads // 4, 128, device)
        calls = {name: prepare(q, k, v), "prefill_attn": lambda q=q, k=k, v=v: ops.prefill_attn(q, k, v)}
        times = milliseconds(calls, device, rounds)
        rows.append({"length": length, "ms": times, "ratio": times[name] / times["prefill_attn"]})
        print(name, rows[-1], flush=True)
    return rows


def lazy(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    """The pass that identifies as it goes."""
    return lambda: ops.prefill_attn_lazy(q, k, v, n_last=N_LAST, **WINDOW)


def retained_mass(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    """The call of its own beside another kernel's pass: constant in the context length."""
    _, lse = ops.prefill_attn(q, k, v)
    last_q, last_lse = q[:, -N_LAST:], lse[:, :, -N_LAST:]
    return lambda: ops.retained_mass(last_q, k, last_lse, **WINDOW)


def decode(device: str, lengths: list[int]) -> list[dict[str, Any]]:
    """One decode step over a cache of `length` keys, 32 query and 8 KV heads: bytes of K and V per second, beside a
    copy of the same bytes (which reads and writes each once)."""
    rows = []
    for batch in (1, 16):
        for length in lengths:
            q, k, v = (t[:, :1].contiguous() for t in qkv(batch, 1, 32, 8, 128, device))
            k_cache, v_cache = (
                torch.randn(batch, length, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(2)
            )
            target = torch.empty_like(k_cache)
            seq_len = torch.full((batch,), length - 1, dtype=torch.int32, device=device)
            n_recent = torch.zeros(batch, dtype=torch.int32, device=device)
            times = milliseconds(
                {
                    "streaming_decode": lambda a=(q, k, v, k_cache, v_cache, seq_len), n=n_recent: ops.streaming_decode(
                        *a, n_sink=4, n_recent=n
                    ),
                    "copy": lambda t=target, s=k_cache: t.copy_(s),
                },
                device,
            )
            n_bytes = 2 * k_cache.numel() * 2
            rows.append(
                {"batch": batch, "length": length, "ms": times}
                | {"gb_per_s": {name: n_bytes / t / 1e6 for name, t in times.items()}}
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with short prompts")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    short = [64, 128]
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU: --rehearse runs the same steps on the CPU")
    machine = torch.cuda.get_device_name() if device == "cuda" else "rehearsal on a CPU: no timing means anything"
    print(f"{machine}, torch {torch.__version__}", flush=True)
    result = {
        "machine": machine,
        "torch": torch.__version__,
        "prefill": prefill(device, short if options.rehearse else [1024, 4096, 16384]),
        "identification": beside_prefill(
            "prefill_attn_lazy", lazy, device, short if options.rehearse else [4096, 16384, 32768, 65536, 131072], 8, 9
        ),
        "retained_mass": beside_prefill(
            "retained_mass", retained_mass, device, short if options.rehearse else [4096, 32768], 32
        ),
        "decode": decode(device, short if options.rehearse else [1024, 8192, 65536]),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
