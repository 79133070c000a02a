"""What does a rule cost in quality: how far does the answer's negative log-likelihood rise over the full cache's?

Each prompt hides one number in a long text and asks for it. One prefill with all layers full; then, for each rule and
number of full layers, a copy of that cache whose other layers are cut, over which the answer is fed token by token. The
first answer token is left out: it comes from the prefill, which is the same for all. Prints the mean rise per token.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, Literal

import output
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lighttransfer
from lighttransfer.cache import LightTransferCache
from lighttransfer.cli.measure import cache_argument
from lighttransfer.cli.models import load_model
from lighttransfer.cli.options import device_and_dtype
from lighttransfer.cli.parser import add_model_options, add_output_options
from lighttransfer.cli.prompts import Prompt, needle_prompts
from lighttransfer.selection import LayerSelector, LayerSignal, LazyRatio, Policy, make_policy

SCORED = ("lazy_ratio", "nonsink_peak", "output_error")
FIXED = ("last", "first", "random")


class ScoreAll(Policy):
    """Remembers what every rule says of every layer, so that one prefill serves them all."""

    name = "score_all"
    keeps: ClassVar[Literal["smallest", "largest"] | None] = "smallest"
    needs_outputs = True

    def __init__(self) -> None:
        self.rules = {name: make_policy(name) for name in SCORED}
        self.scores: dict[str, list[float]] = {name: [] for name in SCORED}

    def score(self, signal: LayerSignal) -> Tensor:
        for name, rule in self.rules.items():
            self.scores[name].append(float(rule.score(signal)[0]))
        return LazyRatio().score(signal)

    def kept(self, name: str, n_full: int) -> frozenset[int]:
        """The layers that a rule keeps."""
        selector = LayerSelector(n_full)
        for layer, score in enumerate(self.scores[name]):
            selector.push(layer, self.rules[name].laziness(score))
        return selector.full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.25, 0.4, 0.55, 0.7])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--full-layers", type=int, nargs="+", default=[22, 15, 8, 4])
    parser.add_argument("--n-recent", type=int, default=1020)
    parser.add_argument("--plot", type=Path, help="writes a picture (png, svg or pdf)")
    add_model_options(parser)
    add_output_options(parser)
    args = parser.parse_args()
    device, dtype = device_and_dtype(args)
    model, tokenizer = load_model(args.model, dtype, device)
    lighttransfer.enable(model, n_recent=args.n_recent)
    prompts = needle_prompts(tokenizer, n_tokens=args.prompt_tokens, depths=args.depths, seeds=args.seeds)
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        arms = [(name, n_full) for name in (*SCORED, *FIXED) for n_full in args.full_layers]
        task = progress.add_task("prompts", total=len(prompts) * len(arms))
        for seed, prompt in enumerate(prompts):
            results.append(rises(model, tokenizer, prompt, arms, seed, lambda: progress.advance(task)))
    report(args, arms, results)


@torch.inference_mode()
def rises(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    arms: list[tuple[str, int]],
    seed: int,
    done: Any,
) -> dict[str, Any]:
    """``full``: the answer's NLL per token over the full cache; each arm: how much higher it is there."""
    ids = torch.tensor([prompt.input_ids], device=model.device)
    answer = tokenizer(f" {prompt.answer}", add_special_tokens=False).input_ids
    # Two prefills: one that measures (a rule that keeps all layers would not look), one whose layers all stay full.
    policy, layers = ScoreAll(), LightTransferCache(model.config).report().competing_layers
    full = LightTransferCache(model.config, full_layers=1.0)
    for cache in (LightTransferCache(model.config, policy=policy, full_layers=len(layers) - 1), full):
        model(ids, logits_to_keep=1, **{cache_argument(model): cache})
    baseline = answer_nll(model, copy.deepcopy(full), answer)
    found: dict[str, Any] = {"depth": prompt.depth, "full": baseline}
    for name, n_full in arms:
        if name in SCORED:
            kept = policy.kept(name, n_full)
        else:
            fixed = make_policy({"name": name, "seed": seed} if name == "random" else name)
            kept = fixed.full_layers(layers, n_full)
        cache = copy.deepcopy(full)
        for layer in cache.competing:
            if layer.index not in kept:
                layer.cut([0], cache.lengths, layer.clock.seq_len)
        found[f"{name} {n_full}"] = answer_nll(model, cache, answer) - baseline
        done()
    return found


def answer_nll(model: PreTrainedModel, cache: LightTransferCache, answer: list[int]) -> float:
    """Mean negative log-likelihood, in nats, of the answer's tokens but the first, fed one by one."""
    losses = []
    for token, following in itertools.pairwise(answer):
        logits = model(torch.tensor([[token]], device=model.device), **{cache_argument(model): cache}).logits[0, -1]
        losses.append(-float(torch.log_softmax(logits.float(), -1)[following]))
    return mean(losses)


def report(args: argparse.Namespace, arms: list[tuple[str, int]], results: list[dict[str, Any]]) -> None:
    """Prints each rule's mean rise over the prompts, and draws it."""
    means: dict[str, dict[int, float]] = {name: {} for name, _ in arms}
    for name, n_full in arms:
        means[name][n_full] = mean(result[f"{name} {n_full}"] for result in results)
    baseline = mean(result["full"] for result in results)
    title = (
        f"{args.model}, {len(results)} needles in {args.prompt_tokens} tokens: rise of the answer's NLL, nats a token"
    )
    table = output.table(title, {"rule": "left", **{f"{n} full": "right" for n in args.full_layers}})
    for name, values in means.items():
        table.add_row(name, *(f"{values[n]:+.3f}" for n in args.full_layers))
    table.caption = f"over the full cache's {baseline:.3f}"
    if args.plot:
        plot(args.plot, means, title)
    output.show(args, {"prompt_tokens": args.prompt_tokens, "full": baseline, "rise": means, "prompts": results}, table)


def plot(path: Path, means: dict[str, dict[int, float]], title: str) -> None:
    """The rise over the number of full layers, a line for each rule."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, values in means.items():
        style = {"linestyle": "--", "alpha": 0.6} if name in FIXED else {"linewidth": 2}
        axes.plot(list(values), list(values.values()), marker="o", label=name, **style)
    axes.set(xlabel="full layers", ylabel="rise of the answer's NLL, nats a token")
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_xticks(list(next(iter(means.values()))))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
