"""How fast does a model decode after a long prompt: with sdpa and DynamicCache, with every layer full, with half?

Each variant prefills once. Then they decode step by step in turn, each over its own cache, so that whatever else the
machine does falls on all of them alike. Prints medians and their ratios.
"""

from __future__ import annotations

import argparse
import copy
from statistics import median
from typing import Any

import output
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import DynamicCache, PreTrainedModel

import lighttransfer
from lighttransfer.cli.measure import cache_argument, kv_bytes
from lighttransfer.cli.models import load_model
from lighttransfer.cli.options import device_and_dtype
from lighttransfer.cli.parser import add_model_options, add_output_options
from lighttransfer.cli.prompts import passage_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    output.add_clock_option(parser)
    add_model_options(parser)
    add_output_options(parser)
    args = parser.parse_args()
    device, dtype = device_and_dtype(args)
    plain, tokenizer = load_model(args.model, dtype, device)
    # The same weights twice: one model attends as transformers does, the other through lighttransfer.
    hybrid = lighttransfer.enable(copy.deepcopy(plain, {id(p): p for p in plain.parameters()}))
    arms: dict[str, tuple[PreTrainedModel, Any]] = {
        "sdpa + DynamicCache": (plain, DynamicCache(config=plain.config)),
        "lighttransfer, all layers full": (hybrid, lighttransfer.LightTransferCache(hybrid.config, full_layers=1.0)),
        "lighttransfer, half of the layers": (hybrid, lighttransfer.LightTransferCache(hybrid.config, full_layers=0.5)),
    }
    ids = torch.tensor([passage_ids(tokenizer, args.prompt_tokens + args.steps)], device=plain.device)
    seconds = time_steps(arms, ids, args.prompt_tokens, output.CLOCKS[args.clock])
    report(args, arms, seconds)


def time_steps(
    arms: dict[str, tuple[PreTrainedModel, Any]], ids: torch.Tensor, n_prompt: int, clock: Any, n_warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of each decode step of each arm; the prose goes on as the tokens to feed, so all arms do the same."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    n_steps = ids.shape[1] - n_prompt
    with torch.inference_mode(), Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prefill and decode", total=len(arms) * (1 + n_steps / 16))
        for model, cache in arms.values():
            model(ids[:, :n_prompt], logits_to_keep=1, **{cache_argument(model): cache})
            progress.advance(task)
        names = list(arms)
        for step in range(n_steps):
            for name in names[step % len(names) :] + names[: step % len(names)]:
                model, cache = arms[name]
                token = ids[:, n_prompt + step : n_prompt + step + 1]
                begin = clock()
                model(token, **{cache_argument(model): cache})
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
                if step >= n_warm_up:
                    seconds[name].append(clock() - begin)
                progress.advance(task, 1 / 16)
    return seconds


def report(args: argparse.Namespace, arms: dict[str, Any], seconds: dict[str, list[float]]) -> None:
    """Prints the medians and their ratios to the first arm."""
    first = median(next(iter(seconds.values())))
    rows = [
        {
            "name": name,
            "step_ms": 1e3 * median(seconds[name]),
            "tokens_per_second": 1 / median(seconds[name]),
            "speed_ratio": first / median(seconds[name]),
            "kv_bytes": kv_bytes(cache),
        }
        for name, (_, cache) in arms.items()
    ]
    n_steps = len(next(iter(seconds.values())))
    title = f"decode of {args.model} after {args.prompt_tokens} tokens, {n_steps} steps, medians, {args.clock} clock"
    headings = ("ms a step", "tokens/s", "speed ratio", "K/V now")
    table = output.table(title, {"": "left", **dict.fromkeys(headings, "right")})
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['step_ms']:.1f}",
            f"{row['tokens_per_second']:.2f}",
            f"{row['speed_ratio']:.3f}",
            f"{row['kv_bytes'] / 1e6:.1f} MB",
        )
    output.show(args, {"clock": args.clock, "prompt_tokens": args.prompt_tokens, "arms": rows}, table)


if __name__ == "__main__":
    main()
