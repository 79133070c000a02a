"""What does it cost to find out during prefill which layers are lazy?

Both variants read the same prompt and cut the same layers to the same window. One is told the layers beforehand (a
static list), the other measures the attention mass of the last queries, scores the layers and keeps the heap. They run
in turn; prints the ratio of their median times at each length.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import output
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer.cli.measure import cache_argument
from lighttransfer.cli.models import load_model
from lighttransfer.cli.options import device_and_dtype, parse_policy
from lighttransfer.cli.parser import add_model_options, add_output_options
from lighttransfer.cli.prompts import passage_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=7, help="timed prefills of each variant at each length")
    parser.add_argument("--policy", default="lazy_ratio", help="the rule that identifies (default: %(default)s)")
    output.add_clock_option(parser)
    add_model_options(parser)
    add_output_options(parser)
    args = parser.parse_args()
    device, dtype = device_and_dtype(args)
    model, tokenizer = load_model(args.model, dtype, device)
    lighttransfer.enable(model, policy=parse_policy(args.policy))
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prefill", total=sum(args.lengths) * (2 * args.repeats + 1))
        for length in args.lengths:
            ids = torch.tensor([passage_ids(tokenizer, length)], device=model.device)
            rows.append(
                compare(model, ids, args.repeats, output.CLOCKS[args.clock], lambda n=length: progress.advance(task, n))
            )
    show(args, rows)


def compare(model: PreTrainedModel, ids: torch.Tensor, repeats: int, clock: Any, done: Any) -> dict[str, Any]:
    """Times both variants over ``ids``, ``repeats`` times each, in turn and in alternating order."""
    warm_up = lighttransfer.LightTransferCache(model.config)
    prefill(model, ids, warm_up, clock)
    done()
    kept = warm_up.report().requests[0].full_layers
    policies: dict[str, Any] = {"told": {"name": "static", "layers": kept}, "identified": None}
    seconds: dict[str, list[float]] = {name: [] for name in policies}
    for repeat in range(repeats):
        for name in list(policies)[:: 1 if repeat % 2 == 0 else -1]:
            cache = lighttransfer.LightTransferCache(model.config, policy=policies[name])
            seconds[name].append(prefill(model, ids, cache, clock))
            done()
    told, identified = median(seconds["told"]), median(seconds["identified"])
    return {
        "tokens": ids.shape[1],
        "told_s": told,
        "identified_s": identified,
        "overhead": identified / told - 1,
        "spread": (max(seconds["told"]) - min(seconds["told"])) / told,
        "full_layers": kept,
    }


def prefill(model: PreTrainedModel, ids: torch.Tensor, cache: Any, clock: Any) -> float:
    """Seconds that the model takes to read ``ids`` into an empty cache."""
    begin = clock()
    with torch.inference_mode():
        model(ids, logits_to_keep=1, **{cache_argument(model): cache})
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Prints a row for each length."""
    title = f"prefill of {args.model}, medians of {args.repeats}, rule {args.policy}, {args.clock} clock"
    headings = ("tokens", "layers told, s", "layers identified, s", "overhead", "spread of the first")
    table = output.table(title, dict.fromkeys(headings, "right"))
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            f"{row['told_s']:.3f}",
            f"{row['identified_s']:.3f}",
            f"{row['overhead']:+.2%}",
            f"{row['spread']:.1%}",
        )
    result = {"policy": args.policy, "clock": args.clock, "repeats": args.repeats, "lengths": rows}
    output.show(args, result, table)


if __name__ == "__main__":
    main()
