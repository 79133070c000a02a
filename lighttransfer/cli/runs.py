"""Runs several variants over one prompt and shows them side by side: what ``demo`` and ``generate`` share."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .measure import Measured, Variant, decoder_layers, machine, machine_line, measure
from .options import UsageError
from .render import bar, legend, progress_bars, score_table, side_by_side


def messages() -> Console:
    """Where progress and notes go: standard error, so that standard output holds nothing but the result."""
    return Console(stderr=True)


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Sequence[int],
    variants: Sequence[Variant],
    *,
    new_tokens: int,
    stop_at_eos: bool,
) -> list[Measured]:
    """Measures each variant in turn, with a bar for each.

    Raises:
        UsageError: the prompt does not fit into the model's context, or a setting does not fit the model.
    """
    check_length(model, len(input_ids), new_tokens)
    runs: list[Measured] = []
    console = messages()
    with progress_bars(console) as progress:
        for variant in variants:
            if not console.is_terminal:  # a log shows no bars
                console.print(f"{variant.name}: {len(input_ids)} prompt tokens, then up to {new_tokens} new ones ...")
            tell = bar(progress, variant.name, len(decoder_layers(model)))
            try:
                run = measure(
                    model,
                    tokenizer,
                    input_ids,
                    variant,
                    new_tokens=new_tokens,
                    stop_at_eos=stop_at_eos,
                    progress=tell,
                )
            except (ValueError, TypeError) as error:
                if variant.settings is None:
                    raise
                raise UsageError(f"{variant.name}: {error}") from error
            runs.append(run)
    return runs


def check_length(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Refuses what the model's positions cannot hold."""
    if new_tokens < 2:
        raise UsageError(f"--new-tokens must be at least 2, because the first comes from the prefill, got {new_tokens}")
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and prompt_tokens + new_tokens > limit:
        raise UsageError(
            f"the prompt's {prompt_tokens} tokens and {new_tokens} new ones exceed the model's context of {limit} "
            "tokens: shorten one of them"
        )


def print_comparison(
    runs: Sequence[Measured],
    n_layers: int,
    *,
    as_json: bool,
    header: dict[str, Any],
    right: Sequence[bool] = (),
) -> None:
    """The result on standard output.

    Args:
        header: what the JSON object starts with; its ``title`` is the table's first line.
        right: see :func:`~lighttransfer.cli.render.side_by_side`.
    """
    if as_json:
        rows = [run.to_dict() for run in runs]
        for row, ok in zip(rows, right, strict=False):
            row["is_right"] = ok
        json.dump({**header, "machine": machine(), "runs": rows}, sys.stdout, indent=2)
        print()
        return
    console = Console()
    console.print(Text(header["title"], style="bold"))
    console.print(side_by_side(runs, n_layers, right, console.width))
    console.print(legend())
    scores = score_table(runs)
    if scores is not None:
        console.print()
        console.print(scores)
    for run in runs:
        if run.report and not run.report.requests[0].is_decided:
            window = run.report.n_sink + run.report.n_recent
            console.print(
                f"{run.name}: the prompt says nothing about the layers, because it does not outgrow the window of "
                f"{window} tokens; every layer is still full"
            )
    console.print(machine_line(), style="dim")
