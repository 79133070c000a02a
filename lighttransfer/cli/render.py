"""Tables and bars for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lighttransfer.cache import CacheReport

from .measure import Measured
from .measure import Progress as Tell

_FULL, _STREAMING = ("█", "green"), ("░", "yellow")


def megabytes(n_bytes: int) -> str:
    """``n_bytes`` in MB of 10**6 bytes."""
    return f"{n_bytes / 1e6:.1f} MB"


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Bars that vanish once they are done; nothing is drawn where there is no terminal."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield progress


def bar(progress: Progress, description: str, n_layers: int) -> Tell:
    """A bar for one run: the layers of the prefill, then the tokens."""
    task = progress.add_task(description, what="prefill")

    def tell(done: int, total: int) -> None:
        what = f"prefill, layer {done} of {n_layers}" if done <= n_layers else f"token {done - n_layers}"
        progress.update(task, completed=done, total=total, what=what)

    return tell


def layer_map(report: CacheReport | None, n_layers: int, width: int = 10**9) -> Text:
    """One character for each layer: full, streaming, or a native window of the model's own; in equal lines."""
    text = Text()
    n_lines = -(-n_layers // max(1, width))
    per_line = -(-n_layers // n_lines)
    streaming = set(report.requests[0].streaming_layers) if report else set()
    competing = set(report.competing_layers) if report else set(range(n_layers))
    for layer in range(n_layers):
        if layer and layer % per_line == 0:
            text.append("\n")
        if layer not in competing:
            text.append("·")
        else:
            mark, style = _STREAMING if layer in streaming else _FULL
            text.append(mark, style=style)
    return text


def legend() -> Text:
    """What the characters of :func:`layer_map` mean."""
    text = Text("layers, first to last: ")
    text.append(_FULL[0], style=_FULL[1])
    text.append(" keeps its whole cache  ")
    text.append(_STREAMING[0], style=_STREAMING[1])
    text.append(" streams (sinks and recent window)")
    return text


def side_by_side(runs: Sequence[Measured], n_layers: int, right: Sequence[bool] = (), width: int = 80) -> Table:
    """A column for each run: answer, layers, bytes, speeds.

    Args:
        right: whether each run gave the right answer, if that is known.
        width: of the terminal.
    """
    column = (width - 10) // len(runs) - 3
    table = Table(show_lines=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run.name, overflow="fold", ratio=1)

    def add(label: str, cells: list[RenderableType]) -> None:
        table.add_row(label, *cells)

    add("answer", [Text(run.text or "(nothing)") for run in runs])
    if right:
        add(
            "right",
            [Text("yes", style="bold green") if ok else Text("no", style="bold red") for ok in right],
        )
    add("layers", [layer_map(run.report, n_layers, column) for run in runs])
    add("KV now", [_share(run.kv_bytes, runs[0].kv_bytes) for run in runs])
    add("KV peak", [_share(run.kv_peak_bytes, runs[0].kv_peak_bytes) for run in runs])
    add("prefill", [_speed(run.prefill_speed, runs[0].prefill_speed) for run in runs])
    add("decode", [_speed(run.decode_speed, runs[0].decode_speed) for run in runs])
    return table


def _share(n_bytes: int, first: int) -> str:
    return f"{megabytes(n_bytes)} ({n_bytes / first:.0%})"


def _speed(speed: float, first: float) -> str:
    return f"{speed:.1f} tok/s" + (f" (x{speed / first:.2f})" if first else "")


def score_table(runs: Sequence[Measured], n_columns: int = 2) -> Table | None:
    """Each layer's score under each run's rule; ``None`` if no run scored anything.

    The layers run down ``n_columns`` groups of columns.
    """
    scored = [run for run in runs if run.report and run.report.requests[0].scores]
    if not scored:
        return None
    layers = sorted({layer for run in scored if run.report for layer in run.report.requests[0].scores})
    n_rows = -(-len(layers) // n_columns)
    table = Table(pad_edge=False, title="score of each layer; marked: keeps its whole cache", title_justify="left")
    for _ in range(n_columns):
        table.add_column("layer", justify="right")
        for run in scored:
            table.add_column(run.name, justify="right")
    for row in range(n_rows):
        cells: list[RenderableType] = []
        for layer in layers[row::n_rows]:
            cells.append(str(layer))
            cells.extend(_score(run.report, layer) for run in scored if run.report)
        table.add_row(*cells)
    return table


def _score(report: CacheReport, layer: int) -> Text:
    request = report.requests[0]
    is_full = layer in request.full_layers
    mark, style = _FULL if is_full else (" ", _STREAMING[1])
    score = request.scores.get(layer)
    return Text(f"{score:.4f} {mark}" if score is not None else f"- {mark}", style=style)
