"""Every CUDA kernel of a build: what ptxas gave it, what the simulator counts, and what binds it on an A100.

    python bench/kernel_report.py [--objects build/cmake/cuda] [--cuobjdump PATH] [--json]

Resources come from the .ptxas reports beside the objects; occupancy, bank conflicts and coalescing from one launch of
each bf16 kernel in tests/cudasim. The bound is the unit that the counts keep busy longest: an upper bound on speed,
without latencies, and not a measurement.

- prefill_attn: its steady loop in SASS, which needs cuobjdump and nvdisasm (bench/sass.py); share of 312 TFLOP/s, and
  behind it what a model of latencies, barriers and issue slots leaves of that (bench/issue_model.py).
- the others: the whole launch, in PTX instructions, on the SM with most CTAs, and from DRAM the bytes that
  each asks for (ideally coalesced: caches may do the rest); share of 1,555 GB/s (40 GB) and 2,039 GB/s (80 GB).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from issue_model import tensor_share
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sass import disassemble, find_cuobjdump, steady_loop

from lighttransfer import _library, ops

ROOT = Path(__file__).resolve().parents[1]

# An A100 (sm_80), per SM unless said otherwise.
SMS = 108
CLOCK_GHZ = 1.41
TFLOPS = 312
GB_PER_SECOND = (1_555, 2_039)
SHARED_BYTES = 164 << 10
CTA_RESERVED_BYTES = 1 << 10  # of shared memory, which the driver takes for each CTA
REGISTERS = 65_536
WARPS = 64
CTAS = 32
# SM clocks that one warp instruction keeps its unit busy: four sub-partitions share all but shared memory, 128 B a
# clock, where an instruction of 16 bytes a lane takes four.
CLOCKS = {"tensor": 2.0, "special functions": 2.0, "FP32": 0.5, "issue": 0.25, "shared memory": 4.0}
SASS_UNITS = {
    "tensor": ("HMMA",),
    "special functions": ("MUFU", "F2FP"),
    "FP32": ("FADD", "FMUL", "FFMA"),
    "shared memory": ("LDSM", "LDGSTS"),
}

Row = dict[str, Any]


def resources(objects: Path) -> dict[str, Row]:
    """By mangled name: what ptxas reports of each kernel."""
    pattern = (
        r"Compiling entry function '(\S+)' for 'sm_80'\n.*\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\n.*Used (\d+) registers(?:, used \d+ barriers)?(?:, (\d+) bytes smem)?"
    )
    rows = {}
    for path in sorted(objects.rglob("*.cu.o.ptxas")):
        for name, frame, stores, loads, registers, shared in re.findall(pattern, path.read_text()):
            rows[name] = {
                "kernel": short_name(name),
                "registers": int(registers),
                "stack_bytes": int(frame),
                "spill_bytes": int(stores) + int(loads),
                "static_shared": int(shared or 0),
                "object": path.with_suffix(""),
            }
    return rows


def short_name(mangled: str) -> str:
    kernel = re.search(r"\d([a-z_]+)_kernel", mangled)
    types = {"13__nv_bfloat16": "bf16", "6__half": "fp16", "5uint4": "16 B", "It": "2 B"}
    dtype = [text for code, text in types.items() if code in mangled.partition("_kernel")[2]]
    sizes = re.findall(r"Li(\d+)E", mangled)
    return " ".join([kernel[1] if kernel else mangled, *dtype, *sizes])


def occupancy(registers: int, threads: int, shared: int) -> Row:
    """CTAs that fit an SM, by what limits them. A warp's registers come in units of 256, warps in fours."""
    warps = -(-threads // 32)
    fit = {
        "warps": WARPS // warps,
        "CTAs": CTAS,
        "registers": REGISTERS // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps,
        "shared memory": SHARED_BYTES // (-(-shared // 128) * 128 + CTA_RESERVED_BYTES),
    }
    limit = min(fit, key=lambda unit: fit[unit])
    return {"ctas_per_sm": fit[limit], "occupancy": fit[limit] * warps / WARPS, "limited_by": limit}


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _decode(head_dim: int, n_heads: int) -> None:
    cache = [_random(1, 1024, 8, head_dim) for _ in range(2)]
    q, k, v = (_random(1, 1, heads, head_dim) for heads in (n_heads, 8, 8))
    ops.streaming_decode(q, k, v, *cache, _int32(1023), n_sink=4, n_recent=_int32(0), mass_n_recent=508)


def _moves(offset: int) -> None:
    """The cache's own kernels over 256 tokens of 8 heads; an offset leaves rows off 16 bytes."""
    k_cache, v_cache, k, v = (_random(1, n, 8, 128 + offset)[..., offset:] for n in (512, 512, 256, 256))
    ops.append_kv_(k_cache, v_cache, k, v, _int32(0), n_sink=4, n_recent=_int32(0))
    ops.gather_kv(k_cache, v_cache, _int32(256), n_sink=4, n_recent=_int32(0), max_len=256)
    ops.compact_kv_(k_cache, v_cache, _int32(512), n_sink=4, n_recent=252)


def launches() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that launch every bf16 kernel once, and what to name them."""
    for d in (64, 96, 128, 256):
        qkv = [_random(1, 1024, heads, d) for heads in (2, 1, 1)]
        yield "B=1 S=1024 H=2/1 causal", lambda qkv=qkv: ops.prefill_attn(*qkv)
        for n_heads in (32, 128):
            yield f"B=1 L=1024 H={n_heads}/8", lambda d=d, n=n_heads: _decode(d, n)
        q, k, lse = _random(1, 32, 32, d), _random(1, 2048, 8, d), torch.full((1, 32, 32), 8.0)
        yield (
            "B=1 S=32 H=32/8 1,024 kept",
            lambda q=q, k=k, lse=lse: ops.retained_mass(q, k, lse, n_sink=4, n_recent=1020),
        )
    yield "H=32 32 queries", lambda: ops.lazy_ratio(torch.rand(1, 32, 32, 2))
    out, lse = _random(1, 128, 32, 128), torch.zeros(1, 32, 128)
    yield "B=1 S=128 H=32", lambda: ops.merge_states(out, lse, out, lse)
    for offset in (0, 1):
        yield f"256 tokens of 8 heads{', unaligned' if offset else ''}", lambda offset=offset: _moves(offset)


def simulate(library: Path | None) -> dict[str, tuple[str, Any]]:
    """By mangled name: the first launch's label and report."""
    sys.path.insert(0, str(ROOT / "tests"))
    import cudasim

    cudasim.load_ops(library=library)
    _library.namespace = "lighttransfer_sim"
    found: dict[str, tuple[str, Any]] = {}
    calls = list(launches())
    for label, call in track(calls, "Simulating", console=Console(stderr=True), transient=True):
        with cudasim.record() as log:
            call()
        for report in log.reports:
            found.setdefault(report.kernel, (label, report))
    return found


def loop_bound(trip: Counter[str]) -> Row:
    """Clocks of a warp's trip through the steady loop; the share of the tensor cores' rate that is left."""
    clocks = {unit: CLOCKS[unit] * sum(trip[code] for code in codes) for unit, codes in SASS_UNITS.items()}
    clocks["issue"] = CLOCKS["issue"] * trip.total()
    binding = max(clocks, key=lambda unit: clocks[unit])
    share = clocks["tensor"] / clocks[binding]
    return {"unit": binding, "share": share, "tflops": share * TFLOPS, "clocks": clocks}


def launch_bound(report: Any) -> Row:
    """Microseconds of each unit for a whole launch; the share of DRAM's rate that is left, for either memory."""
    ctas = report.grid[0] * report.grid[1] * report.grid[2]
    count = report.instructions
    clocks = {
        "tensor": CLOCKS["tensor"] * count["mma"],
        "special functions": CLOCKS["special functions"] * count["mufu"],
        "FP32": CLOCKS["FP32"] * count["fp32"],
        "issue": CLOCKS["issue"] * report.total_instructions,
        "shared memory": report.shared_load["wavefronts"] + report.shared_store["wavefronts"],
    }
    busiest = -(-ctas // SMS) / ctas  # of all CTAs, on one SM
    times = {unit: value * busiest / CLOCK_GHZ / 1e3 for unit, value in clocks.items()}
    moved = 32 * (report.global_load["ideal_sectors"] + report.global_store["ideal_sectors"])
    bounds = []
    for rate in GB_PER_SECOND:
        both = {**times, "DRAM": moved / rate / 1e3}
        binding = max(both, key=lambda unit: both[unit])
        bounds.append({"gb_per_second": rate, "unit": binding, "share": both["DRAM"] / both[binding], "us": both})
    return {**bounds[0], "other_memory": bounds[1]}


def complete(rows: dict[str, Row], simulated: dict[str, tuple[str, Any]], cuobjdump: str | None) -> None:
    for name, row in rows.items():
        # fp16 kernels have the shapes of their bf16 twins, which are those that were launched.
        label, report = simulated.get(name.replace("6__half", "13__nv_bfloat16"), (None, None))
        if report is None:
            continue
        row["threads"], row["dynamic_shared"] = report.block[0], report.dynamic_shared
        row |= occupancy(row["registers"], row["threads"], row["static_shared"] + row["dynamic_shared"])
        if "prefill_attn" in name and cuobjdump:
            (listing,) = disassemble(cuobjdump, row["object"]).values()
            trip = steady_loop(listing)
            mix = Counter(instruction.opcode for instruction in trip)
            row["loop_per_hmma"], row["loop_mix"] = mix.total() / mix["HMMA"], dict(mix.most_common())
            row["bound"] = loop_bound(mix)
            if name in simulated:
                row["bound"]["modelled"] = tensor_share(trip, row["ctas_per_sm"], row["threads"] // 32, offsets=4)
        if name not in simulated:
            continue
        row |= {
            "launch": label,
            "grid": report.grid,
            "warp_instructions": report.total_instructions,
            "bank_conflicts": report.bank_conflicts,
            "global_efficiency": report.global_efficiency,
            "findings": len(report.findings),
        }
        if "prefill_attn" not in name:
            row["bound"] = launch_bound(report)


def _bound_text(bound: Row) -> str:
    if "tflops" in bound:
        modelled = f"; modelled {bound['modelled']:.0%}" if "modelled" in bound else ""
        return f"{bound['unit']}: {bound['share']:.0%}, {bound['tflops']:.0f} TFLOP/s{modelled}"
    other = bound["other_memory"]
    second = f"{other['share']:.0%}" if other["unit"] == bound["unit"] else f"{other['unit']}, {other['share']:.0%}"
    return f"{bound['unit']}: {bound['share']:.0%} / {second} of DRAM"


def show(rows: list[Row]) -> None:
    table = Table(title="CUDA kernels on an A100: resources, simulated counts, and the unit that binds")
    heads = ("kernel", "regs", "stack, spills", "shared B", "CTAs/SM, limit", "insns", "conflicts", "coalesced")
    for head in (*heads, "SASS/HMMA", "bound"):
        table.add_column(head, justify="left" if head in ("kernel", "bound", "CTAs/SM, limit") else "right")
    for row in rows:
        occupied = f"{row['ctas_per_sm']} ({row['occupancy']:.0%}), {row['limited_by']}" if "threads" in row else ""
        executed = "warp_instructions" in row
        table.add_row(
            row["kernel"],
            str(row["registers"]),
            f"{row['stack_bytes']}, {row['spill_bytes']}",
            str(row["static_shared"] + row.get("dynamic_shared", 0)),
            occupied,
            f"{row['warp_instructions']:,}" if executed else "",
            str(row["bank_conflicts"]) if executed else "",
            f"{row['global_efficiency']:.1%}" if executed else "",
            f"{row['loop_per_hmma']:.2f}" if "loop_per_hmma" in row else "",
            _bound_text(row["bound"]) if "bound" in row else "",
        )
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    for row in rows:
        if "loop_mix" in row:
            mix = ", ".join(f"{code} {n}" for code, n in list(row["loop_mix"].items())[:12])
            console.print(f"{row['kernel']}, steady loop: {mix}", highlight=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=Path, default=ROOT / "build" / "cmake" / "cuda")
    parser.add_argument("--library", type=Path, help="a built _sim.so (default: builds it in build/cmake)")
    parser.add_argument("--cuobjdump", default=find_cuobjdump(), help="for the steady loops in SASS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = resources(options.objects)
    if not rows:
        parser.error(f"no .ptxas report under {options.objects}: build with LIGHTTRANSFER_CUDA=on")
    if options.cuobjdump is None:
        print("no cuobjdump in PATH: prefill_attn's steady loops are left out", file=sys.stderr)
    complete(rows, simulate(options.library), options.cuobjdump)
    listed = sorted(rows.values(), key=lambda row: row["kernel"])
    if options.json:
        print(json.dumps(listed, indent=1, default=str))
    else:
        show(listed)


if __name__ == "__main__":
    main()
