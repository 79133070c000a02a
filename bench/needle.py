"""Does a model still find a number in a long text when half of its layers stream?

Each prompt hides one secret number at some depth of the prose and asks for it. The full cache, the paper's rule and
nonsink_peak each answer all of them. The depths lie outside the recent window, where only full layers can look.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lighttransfer.cli.measure import machine, machine_line
from lighttransfer.cli.models import load_model
from lighttransfer.cli.options import device_and_dtype, variants
from lighttransfer.cli.parser import add_cache_options, add_model_options, add_output_options
from lighttransfer.cli.prompts import Prompt, needle_prompts
from lighttransfer.cli.runs import compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--depths", type=float, nargs="+", default=[0.05, 0.2, 0.35, 0.5, 0.65])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    add_model_options(parser)
    add_cache_options(parser)
    add_output_options(parser)
    args = parser.parse_args()
    device, dtype = device_and_dtype(args)
    chosen = variants(args, baseline=True)
    model, tokenizer = load_model(args.model, dtype, device)
    prompts = needle_prompts(tokenizer, n_tokens=args.prompt_tokens, depths=args.depths, seeds=args.seeds)
    console = Console(stderr=True)
    results = []
    for at, prompt in enumerate(prompts):
        runs = compare(model, tokenizer, prompt.input_ids, chosen, new_tokens=args.new_tokens, stop_at_eos=True)
        results.append({run.name: run.text for run in runs})
        verdicts = ", ".join(f"{run.name} {'right' if prompt.is_answered_by(run.text) else 'wrong'}" for run in runs)
        console.print(f"prompt {at + 1} of {len(prompts)}, depth {prompt.depth:.0%}: {verdicts}")
    show(args, prompts, results)


def show(args: argparse.Namespace, prompts: list[Prompt], results: list[dict[str, str]]) -> None:
    """Prints each prompt's answers and the totals."""
    names = list(results[0])
    right = {
        name: [prompt.is_answered_by(answers[name]) for prompt, answers in zip(prompts, results, strict=True)]
        for name in names
    }
    totals = {name: sum(flags) for name, flags in right.items()}
    if args.json:
        rows: list[dict[str, Any]] = [
            {"depth": p.depth, "seed": p.seed, "tokens": len(p.input_ids), "answer": p.answer, "texts": answers}
            for p, answers in zip(prompts, results, strict=True)
        ]
        result = {"machine": machine(), "full_layers": args.full_layers, "right": totals, "prompts": rows}
        print(json.dumps(result, indent=2))
        return
    table = Table(
        title=f"{args.model}, {len(prompts)} needles in {args.prompt_tokens} tokens, full layers: {args.full_layers}",
        show_footer=True,
    )
    table.add_column("depth", "right")
    table.add_column("number")
    for name in names:
        table.add_column(name, f"{totals[name]} of {len(prompts)}")
    for at, (prompt, answers) in enumerate(zip(prompts, results, strict=True)):
        cells = [Text(answers[name], style="green" if right[name][at] else "red") for name in names]
        table.add_row(f"{prompt.depth:.0%}", prompt.answer, *cells)
    console = Console()
    console.print(table)
    console.print(machine_line(), style="dim")


if __name__ == "__main__":
    main()
