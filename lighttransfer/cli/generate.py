"""``lighttransfer generate``: any causal language model over a prompt of your own."""

from __future__ import annotations

import argparse
from typing import Any

from lighttransfer.models import load_model
from lighttransfer.prompts import chat_ids

from .options import (
    UsageError,
    add_cache_options,
    add_model_options,
    add_output_options,
    device_and_dtype,
    read_prompt,
    variants,
)
from .runs import compare, messages, print_comparison


def add_parser(subparsers: Any) -> None:
    """Adds ``generate`` to the command line."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the variants over the prompt."""
    device, dtype = device_and_dtype(args)
    chosen = variants(args, baseline=not args.no_baseline)
    text = args.prompt if args.prompt is not None else read_prompt(args.prompt_file)
    console = messages()
    with console.status(f"Loading {args.model} ..."):
        model, tokenizer = load_model(args.model, dtype, device)
    input_ids = tokenizer(text).input_ids if args.raw else chat_ids(tokenizer, text)
    if not input_ids:
        raise UsageError("the prompt must hold at least one token")
    runs = compare(model, tokenizer, input_ids, chosen, new_tokens=args.new_tokens, stop_at_eos=True)
    title = f"{args.model}, {len(input_ids)} prompt tokens, {str(model.dtype).removeprefix('torch.')}"
    n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    print_comparison(runs, n_layers, as_json=args.json, header={"title": title, "model": args.model})
