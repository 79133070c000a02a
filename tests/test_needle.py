"""The prose, the prompts made of it, and (slow) whether a real model finds needles while half of its layers stream."""

from __future__ import annotations

import random
import re

import pytest
import tiny_tokenizer

from lighttransfer.cli import prompts
from lighttransfer.cli.prompts import needle_prompt, needle_prompts, passage_ids, question_prompt


def test_prose_fills_a_prompt_of_4000_tokens_and_has_no_digits() -> None:
    assert len(prompts.prose().split()) > 6000  # 1.2 tokens a word in SmolLM2's tokenizer
    assert not re.search(r"\d", prompts.prose()), "a number in the prose could be taken for a needle"


def test_passage_has_exactly_the_tokens_asked_for_and_goes_round() -> None:
    tokenizer = tiny_tokenizer.build()
    once = len(passage_ids(tokenizer, 1)) and len(tokenizer(prompts.prose() + "\n\n").input_ids)
    ids = passage_ids(tokenizer, once + 100)
    assert len(ids) == once + 100
    assert ids[once:] == ids[:100]
    assert prompts.prose().startswith(tokenizer.decode(passage_ids(tokenizer, 50)))


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_needle_stands_once_at_its_depth(depth: float) -> None:
    tokenizer = tiny_tokenizer.build()
    prompt = needle_prompt(tokenizer, n_tokens=3000, depth=depth, seed=3)
    assert 2900 < len(prompt.input_ids) <= 3000
    text = tokenizer.decode(list(prompt.input_ids))
    assert text.startswith("<u>")
    assert text.endswith(f"\n\n{prompt.question}</u><a>{prompt.lead_in}")
    assert f". {prompt.lead_in} {prompt.answer}. " in text.replace("\n\n", " ")
    assert text.count(prompt.answer) == 1
    assert re.fullmatch(r"[1-9]\d{6}", prompt.answer)
    assert abs(text.index(prompt.answer) / len(text) - depth) < 0.05


def test_needle_prompts_are_deterministic_and_differ_from_each_other() -> None:
    tokenizer = tiny_tokenizer.build()
    several = {"n_tokens": 800, "depths": (0.1, 0.5), "seeds": (0, 1, 2)}
    first = needle_prompts(tokenizer, **several)
    random.seed(99)  # the global generator has no say
    assert needle_prompts(tokenizer, **several) == first
    assert len({prompt.answer for prompt in first}) == 6
    assert len({prompt.input_ids[:100] for prompt in first}) == 6, "each seed starts elsewhere in the prose"
    assert needle_prompt(tokenizer, n_tokens=800, depth=0.1, seed=0).answer == "8056020"


def test_prompt_longer_than_the_prose() -> None:
    tokenizer = tiny_tokenizer.build()
    once = len(tokenizer(prompts.prose()).input_ids)
    prompt = needle_prompt(tokenizer, n_tokens=2 * once, depth=0.5, seed=0)
    assert 2 * once - 100 < len(prompt.input_ids) <= 2 * once


def test_question_prompt_knows_where_its_answer_stands() -> None:
    tokenizer = tiny_tokenizer.build()
    prompt = question_prompt(tokenizer, "Who built the mole?", "Tobias Wren", lead_in="The engineer was", n_tokens=6000)
    text = tokenizer.decode(list(prompt.input_ids))
    assert text.endswith("\n\nWho built the mole?</u><a>The engineer was")
    assert abs(text.index("Tobias Wren") / len(text) - prompt.depth) < 0.02
    assert prompt.is_answered_by("It was tobias wren.")
    assert not prompt.is_answered_by("It was Calla Duvane.")


@pytest.mark.parametrize("text", ["The number is 1234567.", "1,234,567", "1 234 567 it is"])
def test_an_answer_may_group_its_digits(text: str) -> None:
    prompt = prompts.Prompt((), "", "", "1234567", 0.5, 0)
    assert prompt.is_answered_by(text)
    assert not prompt.is_answered_by(text.replace("567", "568"))


def test_bad_arguments_are_named() -> None:
    tokenizer = tiny_tokenizer.build()
    with pytest.raises(ValueError, match=r"depth must lie in \[0, 1\], got 1.5"):
        needle_prompt(tokenizer, n_tokens=500, depth=1.5, seed=0)
    with pytest.raises(ValueError, match=r"n_tokens must leave room.*got 20"):
        needle_prompt(tokenizer, n_tokens=20, depth=0.5, seed=0)
    with pytest.raises(ValueError, match="answer must occur in the prose that fits into n_tokens=300, got 'Tobias"):
        question_prompt(tokenizer, "Who?", "Tobias Wren", n_tokens=300)


@pytest.mark.slow
def test_nonsink_peak_finds_needles_with_half_of_the_layers() -> None:
    """A short version of bench/needle.py."""
    from lighttransfer.cli.measure import FULL_CACHE, Variant, measure
    from lighttransfer.cli.models import load_smollm2

    model, tokenizer = load_smollm2()
    needles = needle_prompts(tokenizer, n_tokens=4000, depths=(0.1, 0.4, 0.6), seeds=(0,))
    hybrid = Variant("nonsink_peak", {"full_layers": 15, "policy": "nonsink_peak"})
    found = {FULL_CACHE.name: 0, hybrid.name: 0}
    for needle in needles:
        for variant in (FULL_CACHE, hybrid):
            run = measure(model, tokenizer, needle.input_ids, variant, new_tokens=12)
            found[variant.name] += needle.is_answered_by(run.text)
            if run.report is not None:
                assert len(run.report.requests[0].streaming_layers) == 15
    assert found[FULL_CACHE.name] >= 2, "the prompts are too hard to test anything"
    assert found[hybrid.name] >= found[FULL_CACHE.name] - 1
