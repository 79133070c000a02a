"""The pictures of ``lighttransfer inspect``: scores of layers over prompts, and K/V bytes over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from .measure import Measured

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def plot_inspection(path: Path, runs: dict[str, list[Measured]], baseline: Measured | None, title: str) -> None:
    """Writes a picture (png, svg or pdf, by the suffix of ``path``).

    Args:
        runs: for each policy one run per prompt, all with reports; one heat map each.
        baseline: the first prompt with the full cache, for the curve of K/V bytes.
        title: above everything.
    """
    scored = {name: rows for name, rows in runs.items() if any(run.report and _scores(run) for run in rows)}
    n_prompts = max(len(rows) for rows in runs.values())
    heights = [0.9 + 0.22 * n_prompts] * len(scored) + [3.0]
    figure, axes = plt.subplots(
        len(heights),
        1,
        figsize=(9, sum(heights) + 0.5),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
        squeeze=False,
    )
    figure.suptitle(title, fontsize=11)
    for axis, (name, rows) in zip(axes[:, 0], scored.items(), strict=False):
        _heat_map(axis, name, rows)
    _bytes_over_time(axes[-1, 0], runs, baseline)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _scores(run: Measured) -> dict[int, float]:
    return run.report.requests[0].scores if run.report else {}


def _heat_map(axis: Axes, name: str, runs: Sequence[Measured]) -> None:
    """A row for each prompt, a column for each layer; a dot marks a layer that keeps its whole cache."""
    layers = sorted({layer for run in runs for layer in _scores(run)})
    values = np.array([[_scores(run).get(layer, np.nan) for layer in layers] for run in runs])
    image = axis.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest")
    colorbar: Any = axis.figure.colorbar(image, ax=axis, pad=0.01)
    colorbar.ax.tick_params(labelsize=7)
    points = [
        (layers.index(layer), row)
        for row, run in enumerate(runs)
        if run.report
        for layer in run.report.requests[0].full_layers
        if layer in layers
    ]
    if points:
        x, y = zip(*points, strict=True)
        axis.scatter(x, y, s=14, c="white", edgecolors="black", linewidths=0.6)
    axis.set_title(f"{name}: score of each layer; a dot marks a layer that keeps its whole cache", fontsize=9)
    every = max(1, len(layers) // 15)
    axis.set_xticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]], fontsize=7)
    axis.set_yticks(range(len(runs)), [str(row + 1) for row in range(len(runs))], fontsize=7)
    axis.set_xlabel("layer", fontsize=8)
    axis.set_ylabel("prompt", fontsize=8)


def _bytes_over_time(axis: Axes, runs: dict[str, list[Measured]], baseline: Measured | None) -> None:
    """K/V bytes after each layer of the first prompt's prefill, then after each token."""
    curves = [(name, rows[0]) for name, rows in runs.items()]
    if baseline is not None:
        curves.insert(0, (baseline.name, baseline))
    n_layers = max(len(run.prefill_bytes) for _, run in curves)
    for at, (name, run) in enumerate(curves):
        values = [n_bytes / 1e6 for n_bytes in (0, *run.prefill_bytes, *run.decode_bytes)]
        style = ("-", "--", "-.", ":")[at % 4]  # curves that coincide stay visible
        axis.plot(range(len(values)), values, label=name, color=_COLORS[at % len(_COLORS)], linestyle=style)
    axis.axvline(n_layers, color="grey", linewidth=0.8)
    for side, text in (("right", "prefill "), ("left", " decode")):
        axis.text(n_layers, axis.get_ylim()[1], text, ha=side, va="top", fontsize=8, color="grey")
    axis.set_xlabel(f"layers of the prefill (0 to {n_layers}), then decode steps, of prompt 1", fontsize=8)
    axis.set_ylabel("K/V cache, MB", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=8, loc="lower right")
