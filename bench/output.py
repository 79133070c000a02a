"""How the scripts here measure time and say what they found: clocks, a table for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from lighttransfer.cli.measure import machine, machine_line

#: Processor time leaves out what other programs take; it needs one thread (OMP_NUM_THREADS=1) and no GPU.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def add_clock_option(parser: argparse.ArgumentParser) -> None:
    """``--clock``: a name in :data:`CLOCKS`."""
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="cpu: processor time of this process")


def table(title: str, columns: dict[str, str]) -> Table:
    """An empty table; ``columns`` maps headings to their alignment."""
    made = Table(title=title)
    for heading, justify in columns.items():
        made.add_column(heading, justify=justify)  # type: ignore[arg-type]
    return made


def show(args: argparse.Namespace, result: dict[str, Any], for_people: Table) -> None:
    """Prints ``result`` with the machine as JSON where ``--json`` asks for it, else the table."""
    if args.json:
        print(json.dumps({"machine": machine(), **result}, indent=2))
        return
    console = Console()
    console.print(for_people)
    console.print(machine_line(), style="dim")
