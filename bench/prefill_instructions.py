"""Instruction counts of the prefill kernels: what ptxas made of the steady loop, and what a whole call executes.

    python bench/prefill_instructions.py --objects build/cmake/cuda/inst [--cuobjdump PATH] [--simulate] [--json]

Reads attention_*.cu.o and their .ptxas reports. --simulate runs bf16 calls (B=1, H_q=2, H_kv=1, causal) in
tests/cudasim.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from sass import disassemble, find_cuobjdump, steady_loop

LENGTHS = (512, 1024, 333)


def static_row(cuobjdump: str, path: Path) -> dict[str, Any]:
    report = Path(f"{path}.ptxas").read_text()
    frame, stores, loads = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)[:3]
    (listing,) = disassemble(cuobjdump, path).values()
    trip = Counter(instruction.opcode for instruction in steady_loop(listing))
    return {
        "kernel": path.name.removesuffix(".cu.o"),
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "stack_bytes": int(frame),
        "spill_bytes": int(stores) + int(loads),
        "loop": trip.total(),
        "hmma": trip["HMMA"],
        "per_hmma": round(trip.total() / trip["HMMA"], 3),
        "mix": dict(trip.most_common()),
    }


def simulate() -> list[dict[str, Any]]:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import cudasim

    cudasim.load_ops()
    rows = []
    for head_dim in (64, 96, 128, 256):
        for length in LENGTHS:
            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(1, length, heads, head_dim, generator=generator).bfloat16() for heads in (2, 1, 1))
            with cudasim.record() as log:
                torch.ops.lighttransfer_sim.prefill_attn(q, k, v)
            report = log.report
            rows.append(
                {
                    "head_dim": head_dim,
                    "length": length,
                    "instructions": report.total_instructions,
                    "mma": report.instructions["mma"],
                    "bank_conflicts": report.bank_conflicts,
                    "findings": len(report.findings),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=Path, required=True)
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.cuobjdump is None:
        parser.error("no cuobjdump in PATH: pass --cuobjdump")

    result: dict[str, Any] = {
        "steady_loop": [
            static_row(options.cuobjdump, path) for path in sorted(options.objects.glob("attention_*.cu.o"))
        ]
    }
    if options.simulate:
        result["simulated"] = simulate()
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for rows in result.values():
        columns = [c for c in rows[0] if c != "mix"]
        print("".join(f"{c:>24}" if c == "kernel" else f"{c:>16}" for c in columns))
        for row in rows:
            print("".join(f"{row[c]:>24}" if c == "kernel" else f"{row[c]:>16}" for c in columns))


if __name__ == "__main__":
    main()
