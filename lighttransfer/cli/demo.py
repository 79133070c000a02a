"""``lighttransfer demo``: a real model, a long prompt, and what a streaming half of its layers changes."""

from __future__ import annotations

import argparse
from typing import Any

from .models import load_smollm2
from .options import UsageError, device_and_dtype, variants
from .prompts import Prompt, needle_prompt, question_prompt
from .runs import compare, messages, print_comparison

#: Asked about one passage of the prose in chronicle.txt.
QUESTION = "Who was the engineer of the mole?"
LEAD_IN, ANSWER = "The engineer of the mole was", "Tobias Wren"


def run(args: argparse.Namespace) -> None:
    """Runs the demo."""
    device, dtype = device_and_dtype(args)
    chosen = variants(args, baseline=True)
    console = messages()
    with console.status(
        "Loading SmolLM2-135M-Instruct (the first time it is converted, which takes half a minute) ..."
    ):
        model, tokenizer = load_smollm2(dtype, device)
    try:
        prompt = _prompt(args, tokenizer)
    except ValueError as error:
        raise UsageError(str(error)) from error
    console.print(
        f"A prompt of {len(prompt.input_ids)} tokens; {prompt.depth:.0%} into it stands the answer to: "
        f"[bold]{prompt.question}[/bold] {prompt.lead_in}"
    )
    runs = compare(model, tokenizer, prompt.input_ids, chosen, new_tokens=args.new_tokens, stop_at_eos=False)
    n_layers = model.config.num_hidden_layers
    title = (
        f"SmolLM2-135M-Instruct, {len(prompt.input_ids)} prompt tokens, {str(model.dtype).removeprefix('torch.')}\n"
        f"{prompt.question} {prompt.lead_in} ... ({prompt.answer})"
    )
    print_comparison(
        runs,
        n_layers,
        as_json=args.json,
        header={
            "title": title,
            "question": prompt.question,
            "lead_in": prompt.lead_in,
            "answer": prompt.answer,
            "depth": prompt.depth,
        },
        right=[prompt.is_answered_by(measured.text) for measured in runs],
    )


def _prompt(args: argparse.Namespace, tokenizer: Any) -> Prompt:
    if args.needle is not None:
        return needle_prompt(tokenizer, n_tokens=args.prompt_tokens, depth=args.needle, seed=args.seed)
    return question_prompt(tokenizer, QUESTION, ANSWER, lead_in=LEAD_IN, n_tokens=args.prompt_tokens)
