"""Kernel reports on the command line.

    python -m cudasim.report kernels.o            what the kernels of a PTX file, object or library hold
    python -m cudasim.report script.py [args]     runs a script and reports every kernel that it launched

Run it from tests/, or with tests/ in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cudasim


def demangle(names: list[str]) -> dict[str, str]:
    """C++ names, by c++filt where there is one."""
    try:
        result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {n: n for n in names}
    return dict(zip(names, result.stdout.splitlines(), strict=True))


def static_report(path: Path) -> list[dict[str, Any]]:
    """One entry for each kernel of the file, nothing executed."""
    before = set(cudasim.kernels())
    for text in cudasim.read_ptx_file(str(path)):
        cudasim.load_ptx(text)
    names = [n for n in cudasim.kernels() if n not in before]
    return [{"kernel": n, **cudasim.kernel(n).info} for n in names]


def launch_report(reports: list[cudasim.LaunchReport], top: int) -> list[dict[str, Any]]:
    """One entry for each kernel and launch geometry, launches added up; ``top`` worst lines each."""
    groups: dict[tuple[Any, ...], list[cudasim.LaunchReport]] = {}
    for r in reports:
        groups.setdefault((r.kernel, r.grid, r.block, r.dynamic_shared), []).append(r)
    return [_summary(key, group, top) for key, group in groups.items()]


def _summary(key: tuple[Any, ...], group: list[cudasim.LaunchReport], top: int) -> dict[str, Any]:
    instructions: Counter[str] = Counter()
    memory: dict[str, Counter[str]] = {
        k: Counter() for k in ("shared_load", "shared_store", "global_load", "global_store")
    }
    lines: dict[int, dict[str, Any]] = {}
    for r in group:
        instructions.update(r.instructions)
        for name, counter in memory.items():
            counter.update(getattr(r, name))
        for line in r.lines():
            entry = lines.setdefault(line["ptx_line"], {**line, "conflicts": 0, "extra_sectors": 0, "executed": 0})
            entry["executed"] += line["executed"]
            entry["conflicts"] += line["wavefronts"] - line["ideal_wavefronts"]
            entry["extra_sectors"] += line["sectors"] - line["ideal_sectors"]
    keep = ("ptx_line", "source", "ptx", "executed", "conflicts", "extra_sectors")

    def worst(by: str) -> list[dict[str, Any]]:
        ranked = sorted((line for line in lines.values() if line[by] > 0), key=lambda line: -line[by])
        return [{k: line[k] for k in keep} for line in ranked[:top]]

    sectors = sum(memory[k]["sectors"] for k in ("global_load", "global_store"))
    ideal = sum(memory[k]["ideal_sectors"] for k in ("global_load", "global_store"))
    return {
        "kernel": key[0],
        "grid": key[1],
        "block": key[2],
        "dynamic_shared": key[3],
        "static_shared": group[0].static_shared,
        "launches": len(group),
        "warp_instructions": sum(r.total_instructions for r in group),
        "instructions": {k: v for k, v in instructions.most_common() if v},
        "bank_conflicts": sum(r.bank_conflicts for r in group),
        "global_efficiency": ideal / sectors if sectors else 1.0,
        **{k: dict(v) for k, v in memory.items()},
        "conflict_lines": worst("conflicts"),
        "uncoalesced_lines": worst("extra_sectors"),
        "findings": [repr(f) for r in group for f in r.findings],
        "million_instructions_per_second": sum(r.total_instructions for r in group)
        / 1e6
        / max(sum(r.seconds for r in group), 1e-9),
    }


def print_static(entries: list[dict[str, Any]]) -> None:
    names = demangle([e["kernel"] for e in entries])
    for e in entries:
        print(names[e["kernel"]])
        stack = f"{e['local_bytes']} B stack a thread"
        print(f"  {e['instructions']} PTX instructions, {e['static_shared']} B static shared, {stack}")
        words = e["warp_file_bytes"] // 128
        print(f"  {e['virtual_registers']} virtual registers, stored in {words} words a thread")
        print("  " + ", ".join(f"{k} {v}" for k, v in sorted(e["classes"].items(), key=lambda x: -x[1])))
        for message in e["unsupported"]:
            print(f"  not supported: {message}")


def print_launches(entries: list[dict[str, Any]]) -> None:
    names = demangle([e["kernel"] for e in entries])
    for e in entries:
        print(names[e["kernel"]])
        shared_bytes = f"{e['static_shared']} + {e['dynamic_shared']} B shared"
        print(f"  grid {e['grid']}, block {e['block']}, {shared_bytes}, {e['launches']} launches")
        total = e["warp_instructions"]
        print(f"  {total:,} warp instructions ({e['million_instructions_per_second']:.1f} million a second simulated)")
        print(
            "    " + ", ".join(f"{k} {v:,} ({v / max(total, 1):.1%})" for k, v in list(e["instructions"].items())[:14])
        )
        shared = {k: sum(e[s][k] for s in ("shared_load", "shared_store")) for k in ("wavefronts", "ideal_wavefronts")}
        print(f"  shared memory: {shared['wavefronts']:,} wavefronts, {e['bank_conflicts']:,} of them bank conflicts")
        sectors = f"{e['global_load']['sectors']:,} sectors read, {e['global_store']['sectors']:,} written"
        print(f"  global memory: {sectors}, {e['global_efficiency']:.1%} of them needed")
        for title, lines in (("bank conflicts", e["conflict_lines"]), ("extra sectors", e["uncoalesced_lines"])):
            for line in lines:
                n = line["conflicts"] if title == "bank conflicts" else line["extra_sectors"]
                print(f"    {n:,} {title} at {line['source']} (PTX line {line['ptx_line']}: {line['ptx']})")
        print(f"  {len(e['findings'])} findings")
        for f in e["findings"]:
            print("    " + f.replace("\n", "\n    "))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cudasim.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--top", type=int, default=5, help="how many of the worst lines to name (5)")
    parser.add_argument("--seed", type=int, default=0, help="random warp schedule (0: in order)")
    parser.add_argument("path", type=Path, help="PTX, object or library; or a Python script to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")
    options = parser.parse_args(argv)
    if options.path.suffix != ".py":
        entries = static_report(options.path)
        print(json.dumps(entries, indent=1)) if options.json else print_static(entries)
        return 0
    sys.argv = [str(options.path), *options.args]
    with cudasim.option(seed=options.seed), cudasim.record() as log:
        runpy.run_path(str(options.path), run_name="__main__")
    entries = launch_report(log.reports, options.top)
    print(json.dumps(entries, indent=1)) if options.json else print_launches(entries)
    return 1 if any(e["findings"] for e in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
