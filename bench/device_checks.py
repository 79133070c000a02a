"""What only a GPU can tell about correctness: CUDA graphs, streams, offsets above 2^31, and the simulator's results.

python bench/device_checks.py [--json FILE] [--small] [--rehearse]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from device_model_checks import MODEL_CHECKS, Missing, tests_path
from torch import Tensor

from lighttransfer import _library, ops

BF16 = torch.bfloat16


def int32(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def decode_inputs(device: str, *, batch: int = 2, capacity: int = 64, dim: int = 128) -> SimpleNamespace:
    """One layer's caches and one step's q, k and v: 8 query heads over 2 KV heads."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(BF16).to(device)

    return SimpleNamespace(
        q=normal(batch, 1, 8, dim),
        k=normal(batch, 1, 2, dim),
        v=normal(batch, 1, 2, dim),
        k_cache=normal(batch, capacity, 2, dim),
        v_cache=normal(batch, capacity, 2, dim),
        n_recent=int32(*([16, 0] * batch)[:batch], device=device),
    )


def graph_across_a_ring_wrap(device: str) -> None:
    """A captured decode step, replayed until its ring has wrapped twice, equals the eager steps bit for bit."""
    steps, start = 40, 5
    eager, graphed = decode_inputs(device), decode_inputs(device)
    inputs = torch.randn(steps, *eager.q.shape, generator=torch.Generator().manual_seed(1)).to(BF16).to(device)

    def step(x: SimpleNamespace, seq_len: Tensor) -> Tensor:
        out, _, _ = ops.streaming_decode(
            x.q, x.k, x.v, x.k_cache, x.v_cache, seq_len, n_sink=2, n_recent=x.n_recent, mass_n_recent=16
        )
        seq_len.add_(1)
        return out

    seq_len = int32(start, start, device=device)
    want = []
    for q in inputs:
        eager.q.copy_(q)
        want.append(step(eager, seq_len).clone())

    seq_len = int32(start, start, device=device)
    if device == "cpu":  # a rehearsal: no graphs, the same steps
        got = [step(graphed, seq_len) for q in inputs if graphed.q.copy_(q) is not None]
    else:
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            step(decode_inputs(device), seq_len.clone())
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(graphed, seq_len)
        got = []
        for q in inputs:
            graphed.q.copy_(q)
            graph.replay()
            got.append(out.clone())
    assert seq_len.tolist() == [start + steps] * 2
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert torch.equal(a, b), f"step {i} differs"
    assert torch.equal(eager.k_cache, graphed.k_cache)


def side_stream(device: str) -> None:
    """The ops run on the current stream: after a long kernel there, before its inputs are ready elsewhere."""
    x = decode_inputs(device)
    args = (x.k_cache, x.v_cache, int32(20, 20, device=device))
    want, _, _ = ops.streaming_decode(x.q, x.k, x.v, *args, n_sink=2, n_recent=x.n_recent)
    if device == "cpu":
        return
    late = torch.zeros_like(x.q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x.q)
        got, _, _ = ops.streaming_decode(late, x.k, x.v, *args, n_sink=2, n_recent=x.n_recent)
    stream.synchronize()
    assert torch.equal(want, got)


def offsets_above_2_31(device: str) -> None:
    """Pages that lie beyond 2^31 elements of the pool are written, moved and attended like the first ones."""
    page, heads, dim = 64, 8, 128
    n_pages = (2**31 // (page * heads * dim) + 64) if device != "cpu" else 128
    pool_k = torch.zeros(n_pages, page, heads, dim, dtype=BF16, device=device)
    pool_v = torch.zeros_like(pool_k)
    low = torch.arange(8, dtype=torch.int32, device=device)[None]
    high = low + (n_pages - 8)
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(1, 400, heads, dim, generator=g).to(BF16).to(device) for _ in range(2))
    q = torch.randn(1, 1, 32, dim, generator=g).to(BF16).to(device)
    results = []
    for table in (low, high):
        full, ring = int32(0, device=device), int32(100, device=device)
        ops.append_kv_(pool_k, pool_v, k, v, int32(0, device=device), n_sink=4, n_recent=full, block_table=table)
        ops.compact_kv_(pool_k, pool_v, int32(400, device=device), n_sink=4, n_recent=100, block_table=table)
        length = int32(400, device=device)
        out, lse, _ = ops.streaming_decode(
            q, k[:, :1], v[:, :1], pool_k, pool_v, length, n_sink=4, n_recent=ring, block_table=table
        )
        keys, _, _ = ops.gather_kv(
            pool_k, pool_v, int32(401, device=device), n_sink=4, n_recent=ring, max_len=104, block_table=table
        )
        results.append((out, lse, keys))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def a_row_alone_equals_its_row_in_a_batch(device: str) -> None:
    x = decode_inputs(device, batch=3, capacity=2048)
    lengths = int32(1500, 40, 700, device=device)
    out, lse, _ = ops.streaming_decode(
        x.q, x.k, x.v, x.k_cache, x.v_cache, lengths, n_sink=2, n_recent=x.n_recent, mass_n_recent=16
    )
    for b in range(3):
        row = slice(b, b + 1)
        alone, alone_lse, _ = ops.streaming_decode(
            *(t[row].clone() for t in (x.q, x.k, x.v, x.k_cache, x.v_cache, lengths)),
            n_sink=2,
            n_recent=x.n_recent[row].clone(),
        )
        assert torch.equal(alone[0], out[b])
        assert torch.equal(alone_lse[0], lse[b])


@contextmanager
def simulated() -> Iterator[None]:
    """The ops in here run the device code in the simulator, on CPU tensors; a finding is an error."""
    if importlib.util.find_spec("pybind11") is None:
        raise Missing("needs pybind11")
    tests_path()
    import simulator

    if reason := simulator.missing():
        raise Missing(reason)
    import cudasim

    simulator.load()
    before, _library.namespace = _library.namespace, "lighttransfer_sim"
    try:
        with cudasim.record() as log:
            yield
    finally:
        _library.namespace = before
    assert not log.findings, str(log.findings[0])


def equals_the_simulator(device: str) -> None:
    """The same PTX, executed by the GPU and by the simulator, agrees within the tensor cores' rounding."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(1, 200, 4, 64, generator=g).to(BF16)
    k, v = (torch.randn(1, 200, 2, 64, generator=g).to(BF16) for _ in range(2))
    window = {"n_sink": 4, "n_recent": 60, "n_last": 32}
    on_device = [t.cpu() for t in ops.prefill_attn_lazy(*(t.to(device) for t in (q, k, v)), **window)]
    with simulated():
        in_simulator = ops.prefill_attn_lazy(q, k, v, **window)
    # A rehearsal compares with the CPU's attention, other code that rounds its bf16 scores in other places.
    sums = 1e-5 if device == "cuda" else 2**-10
    for name, a, b, tolerance in zip(("out", "lse", "mass"), on_device, in_simulator, (2**-7, sums, sums), strict=True):
        torch.testing.assert_close(
            a.float(), b.float(), atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


CHECKS: list[Callable[[str], None]] = [
    graph_across_a_ring_wrap,
    side_stream,
    offsets_above_2_31,
    a_row_alone_equals_its_row_in_a_batch,
    equals_the_simulator,
    *MODEL_CHECKS,
]
SMALL = [graph_across_a_ring_wrap, a_row_alone_equals_its_row_in_a_batch]


def in_simulator(check: Callable[[str], None]) -> Callable[[str], None]:
    def run(device: str) -> None:
        with simulated():
            check(device)

    return run


def outcome(check: Callable[[str], None], device: str) -> str:
    try:
        check(device)
        return "passed"
    except Missing as reason:
        return f"skipped: {reason}"
    except Exception as error:
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}".split("\n")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="only what a sanitizer gets through quickly")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: on the CPU, then in the simulator")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU: --rehearse runs the same checks on the CPU and in the simulator")
    machine = torch.cuda.get_device_name() if device == "cuda" else "rehearsal on a CPU"
    print(f"{machine}, torch {torch.__version__}", flush=True)
    results = {}
    for check in SMALL if options.small else CHECKS:
        results[check.__name__] = outcome(check, device)
        print(f"{check.__name__}: {results[check.__name__]}", flush=True)
        if options.rehearse and check not in (equals_the_simulator, *MODEL_CHECKS):
            name = f"{check.__name__} in the simulator"
            results[name] = outcome(in_simulator(check), device)
            print(f"{name}: {results[name]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 1 if any(r.startswith("failed") for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
