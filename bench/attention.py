"""What attention over a prompt costs, in ratios measured side by side in one run.

  python bench/attention.py [--lengths 1024 2048 4096] [--json]
  python bench/attention.py --threads 1 --clock cpu   where other programs keep the machine busy

1. plain: prefill_attn against torch's scaled_dot_product_attention on the same causal input.
2. identification: prefill_attn_lazy against prefill_attn.
3. streaming: the streaming mask against full attention, whose cost grows with the square of the length.

Every ratio is the median over rounds of (time of one) / (time of the other) with both timed in turn, so that a busy
machine slows both.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lighttransfer.ops import prefill_attn, prefill_attn_lazy

Function = Callable[[], object]


def machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{model}, {torch.get_num_threads()} threads"
    )
    return f"{device}; {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}"


def timed(function: Function, args: argparse.Namespace) -> float:
    """Milliseconds."""
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    if args.device == "cuda":
        torch.cuda.synchronize()
    begin = clock()
    function()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return (clock() - begin) * 1e3


def compare(ours: Function, other: Function, args: argparse.Namespace) -> dict[str, float]:
    """Medians of both times and of their ratio, both timed in turn and in alternating order."""
    ours(), other()
    pairs = []
    for i in range(args.rounds):
        if i % 2 == 0:
            mine = timed(ours, args)
            pairs.append((mine, timed(other, args)))
        else:
            theirs = timed(other, args)
            pairs.append((timed(ours, args), theirs))
    return {
        "ms": statistics.median(a for a, _ in pairs),
        "other_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def cases(args: argparse.Namespace, length: int) -> list[tuple[str, str, str, Function, Function]]:
    dtype = getattr(torch, args.dtype)
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(args.batch, length, heads, args.head_dim, generator=g).to(args.device, dtype)
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )
    window = {"n_sink": args.n_sink, "n_recent": args.n_recent}

    def full() -> object:
        return prefill_attn(q, k, v)

    def sdpa() -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )

    def lazy() -> object:
        return prefill_attn_lazy(q, k, v, n_last=args.n_last, **window)

    def streaming() -> object:
        return prefill_attn(q, k, v, **window)

    return [
        ("plain", "prefill_attn", "torch sdpa", full, sdpa),
        ("identification", "prefill_attn_lazy", "prefill_attn", lazy, full),
        ("streaming", "streaming mask", "prefill_attn", streaming, full),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=9, help="query heads (SmolLM2-135M's)")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--n-sink", type=int, default=4)
    parser.add_argument("--n-recent", type=int, default=1020)
    parser.add_argument("--n-last", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: processor time of this process")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("attention", total=3 * len(args.lengths))
        for length in args.lengths:
            for question, ours_name, other_name, ours, other in cases(args, length):
                measured = compare(ours, other, args)
                results.append({"question": question, "length": length, "of": ours_name, "to": other_name, **measured})
                progress.advance(task)

    if args.json:
        print(json.dumps({"machine": machine(), "settings": vars(args), "results": results}, indent=1))
        return
    shape = f"B={args.batch} H={args.heads}/{args.kv_heads} D={args.head_dim} {args.dtype}"
    window = f"window {args.n_sink} + {args.n_recent}, n_last {args.n_last}"
    table = Table(title=f"{shape}, {window},\nmedians of {args.rounds} rounds, {args.clock} clock", caption=machine())
    for column in ("S", "this", "ms", "against", "ms", "ratio"):
        table.add_column(column, justify="left" if column in ("this", "against") else "right", no_wrap=True)
    for question in ("plain", "identification", "streaming"):
        for r in (r for r in results if r["question"] == question):
            numbers = f"{r['ms']:.2f}", r["to"], f"{r['other_ms']:.2f}", f"{r['ratio']:.3f}"
            table.add_row(str(r["length"]), r["of"], *numbers)
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
