"""``lighttransfer generate``: any causal language model over a prompt of your own."""

from __future__ import annotations

import argparse

from .models import load_model
from .options import UsageError, device_and_dtype, read_prompt, variants
from .prompts import chat_ids
from .runs import compare, messages, print_comparison


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
