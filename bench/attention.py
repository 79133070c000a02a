"""What attention over a prompt costs, in ratios measured side by side in one run.

  python bench/attention.py [--lengths 1024 2048 4096] [--plot FILE.png] [--json]
  OMP_NUM_THREADS=1 python bench/attention.py --clock cpu   where other programs keep the machine busy

1. plain: prefill_attn against torch's scaled_dot_product_attention on the same causal input.
2. identification: prefill_attn_lazy, and retained_mass for users of another kernel, against prefill_attn. The plot
   shows what they add to it, by length.
3. streaming: the streaming mask against full attention, whose cost grows with the square of the length.

Every ratio is the median over rounds of (time of one) / (time of the other) with both timed in turn, so that a busy
machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import output
import torch
from rich.console import Console
from rich.progress import Progress

from lighttransfer.ops import prefill_attn, prefill_attn_lazy, retained_mass

Function = Callable[[], object]


def timed(function: Function, args: argparse.Namespace) -> float:
    """Milliseconds."""
    clock = output.CLOCKS[args.clock]
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

    def mass() -> object:
        return retained_mass(q_last, k, lse_last, **window)

    def streaming() -> object:
        return prefill_attn(q, k, v, **window)

    q_last, lse_last = q[:, -args.n_last :], prefill_attn(q, k, v)[1][..., -args.n_last :]
    return [
        ("plain", "prefill_attn", "torch sdpa", full, sdpa),
        ("identification", "prefill_attn_lazy", "prefill_attn", lazy, full),
        ("identification", "retained_mass", "prefill_attn", mass, full),
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
    output.add_clock_option(parser)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="what identification adds, by length")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("attention", total=4 * len(args.lengths))
        for length in args.lengths:
            for question, ours_name, other_name, ours, other in cases(args, length):
                measured = compare(ours, other, args)
                results.append({"question": question, "length": length, "of": ours_name, "to": other_name, **measured})
                progress.advance(task)

    if args.plot:
        plot(args, results)
    show(args, results)


def shape(args: argparse.Namespace) -> str:
    return f"B={args.batch} H={args.heads}/{args.kv_heads} D={args.head_dim} {args.dtype}"


def show(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    window = f"window {args.n_sink} + {args.n_recent}, n_last {args.n_last}"
    title = f"{shape(args)}, {window},\nmedians of {args.rounds} rounds, {args.clock} clock"
    columns = {"S": "right", "this": "left", "ms": "right", "against": "left", "its ms": "right", "ratio": "right"}
    table = output.table(title, columns)
    for question in ("plain", "identification", "streaming"):
        for r in (r for r in results if r["question"] == question):
            numbers = f"{r['ms']:.2f}", r["to"], f"{r['other_ms']:.2f}", f"{r['ratio']:.3f}"
            table.add_row(str(r["length"]), r["of"], *numbers)
        table.add_section()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    output.show(args, {"settings": settings, "results": results}, table)


def plot(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Percent of the attention pass that identification adds: fused into it, or by a call of its own."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    for op, label, whole in (
        ("prefill_attn_lazy", "prefill_attn_lazy: fused into the pass", 1.0),
        ("retained_mass", "retained_mass: a call of its own", 0.0),
    ):
        points = [(r["length"], 100 * (r["ratio"] - whole)) for r in results if r["of"] == op]
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(xscale="log", xlabel="context length (tokens)", ylabel="% of prefill_attn's time")
    axes.set_xticks(args.lengths, [f"{n:,}" for n in args.lengths])
    axes.minorticks_off()
    axes.set_title(f"What identification costs: {shape(args)}, n_last {args.n_last}", fontsize=10)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.plot, dpi=130)


if __name__ == "__main__":
    main()
