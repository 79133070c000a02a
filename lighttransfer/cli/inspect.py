"""``lighttransfer inspect``: how lazy each layer is on each prompt, and what that makes of the K/V bytes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from .measure import FULL_CACHE, Measured, decoder_layers, machine, machine_line, measure
from .models import load_model
from .options import UsageError, device_and_dtype, read_prompt, variants
from .prompts import chat_ids, needle_prompts
from .render import bar, layer_map, legend, megabytes, progress_bars
from .runs import check_length, messages

_DEPTHS = (0.1, 0.3, 0.5, 0.7)
_SUFFIXES = (".png", ".svg", ".pdf")


def run(args: argparse.Namespace) -> None:
    """Scores the layers."""
    device, dtype = device_and_dtype(args)
    policies = variants(args, baseline=False)
    if args.plot is not None and args.plot.suffix not in _SUFFIXES:
        raise UsageError(f"--plot must end in {', '.join(_SUFFIXES)}, got {args.plot}")
    if args.plot is not None and not args.plot.absolute().parent.is_dir():
        raise UsageError(f"--plot {args.plot}: the folder does not exist")
    texts = [read_prompt(path) for path in args.prompt_file or []]
    with messages().status(f"Loading {args.model} ..."):
        model, tokenizer = load_model(args.model, dtype, device)
    prompts = [chat_ids(tokenizer, text) for text in texts] or _needles(args, tokenizer)
    for ids in prompts:
        check_length(model, len(ids), args.new_tokens)
    with progress_bars(messages()) as progress:

        def one(variant: Any, ids: list[int], label: str) -> Measured:
            tell = bar(progress, label, len(decoder_layers(model)))
            return measure(model, tokenizer, ids, variant, new_tokens=args.new_tokens, stop_at_eos=False, progress=tell)

        baseline = one(FULL_CACHE, prompts[0], FULL_CACHE.name) if args.plot is not None else None
        try:
            runs = {
                policy.name: [one(policy, ids, f"{policy.name}, prompt {at + 1}") for at, ids in enumerate(prompts)]
                for policy in policies
            }
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
    if args.plot is not None:
        from .plots import plot_inspection

        title = f"{args.model}: {args.full_layers} full layers, window {args.n_sink} + {args.n_recent}"
        plot_inspection(args.plot, runs, baseline, title)
    _print(args, runs, model.config.get_text_config(decoder=True).num_hidden_layers)


def _needles(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    if args.prompts < 1:
        raise UsageError(f"--prompts must be at least 1, got {args.prompts}")
    seeds = range(-(-args.prompts // len(_DEPTHS)))
    try:
        needles = needle_prompts(tokenizer, n_tokens=args.prompt_tokens, depths=_DEPTHS, seeds=seeds)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return [list(needle.input_ids) for needle in needles[: args.prompts]]


def _print(args: argparse.Namespace, runs: dict[str, list[Measured]], n_layers: int) -> None:
    if args.json:
        policies = {name: [measured.to_dict() for measured in rows] for name, rows in runs.items()}
        json.dump({"model": args.model, "machine": machine(), "policies": policies}, sys.stdout, indent=2)
        print()
        return
    console = Console()
    table = Table(pad_edge=False)
    for column in ("policy", "prompt", "tokens"):
        table.add_column(column)
    table.add_column("layers", no_wrap=True, min_width=n_layers)
    table.add_column("KV now, peak")
    for name, rows in runs.items():
        for at, measured in enumerate(rows):
            table.add_row(
                name,
                str(at + 1),
                str(measured.prompt_tokens),
                layer_map(measured.report, n_layers),
                f"{megabytes(measured.kv_bytes)}, {megabytes(measured.kv_peak_bytes)}",
            )
    console.print(table)
    console.print(legend())
    if args.plot is not None:
        console.print(f"picture: {args.plot}")
    console.print(machine_line(), style="dim")
