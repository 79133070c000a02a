"""What the arguments of the command line mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from .measure import FULL_CACHE, Variant

#: The rules that are compared where none is named: the paper's and the one that finds needles.
DEFAULT_POLICIES = ("lazy_ratio", "nonsink_peak")


class UsageError(Exception):
    """What the person has to change, in a sentence."""


def device_and_dtype(args: argparse.Namespace) -> tuple[torch.device | None, torch.dtype | None]:
    """What --device and --dtype name; ``None``: the default."""
    try:
        device = torch.device(args.device) if args.device else None
    except RuntimeError as error:
        raise UsageError(f"--device must name a torch device such as cpu or cuda:0, got {args.device}") from error
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {args.device}: this torch sees no GPU; leave --device away to run on the CPU")
    return device, None if args.dtype == "auto" else getattr(torch, args.dtype)


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
