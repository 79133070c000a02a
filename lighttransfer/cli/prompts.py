"""Long prompts of plain prose: a passage, a question about it, and a needle hidden in it."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from transformers import PreTrainedTokenizerBase

#: The places whose secret numbers the needles tell.
_PLACES = (
    "granary",
    "boathouse",
    "orchard",
    "observatory",
    "quarry",
    "bakery",
    "chapel",
    "windmill",
    "smithy",
    "dairy",
)
_INTRODUCTION = "Read the following handbook and answer the question after it.\n\n"
#: A sentence and the white space after it; the numeral of a chapter's heading ends none.
_SENTENCE = re.compile(r".+?(?:(?<![IVX])[.?!][\"']?(?=\s)|\Z)\s*", re.DOTALL)


@functools.cache
def prose() -> str:
    """The handbook of a fictional island: about 6,100 words, 7,350 tokens of SmolLM2's tokenizer, no digits."""
    return resources.files(__package__).joinpath("chronicle.txt").read_text("utf-8").strip()


@dataclass(frozen=True)
class Prompt:
    """A prompt whose answer is known.

    Attributes:
        input_ids: the prompt's tokens, chat template included.
        question: what is asked at its end.
        lead_in: how the assistant's answer begins, which is part of the prompt.
        answer: what a right answer contains.
        depth: where in the prose the answer stands, 0 at the start and 1 at the end.
        seed: what chose the prose and the answer.
    """

    input_ids: tuple[int, ...]
    question: str
    lead_in: str
    answer: str
    depth: float
    seed: int

    def is_answered_by(self, text: str) -> bool:
        """Whether ``text`` contains the answer; thousands separators and case do not matter."""
        return _plain(self.answer) in _plain(text)


def _plain(text: str) -> str:
    return re.sub(r"(?<=\d)[,.\s](?=\d)", "", text).casefold()


def passage_ids(tokenizer: PreTrainedTokenizerBase, n_tokens: int) -> list[int]:
    """Exactly ``n_tokens`` tokens of the prose, from its start and over again once it ends."""
    ids: list[int] = tokenizer(prose() + "\n\n").input_ids
    return (ids * (-(-n_tokens // len(ids))))[:n_tokens]


def question_prompt(
    tokenizer: PreTrainedTokenizerBase, question: str, answer: str, *, lead_in: str = "", n_tokens: int
) -> Prompt:
    """The prose from its start, then ``question`` about it.

    Args:
        answer: must occur in the part of the prose that fits.
        lead_in: the first words of the assistant's turn; a small model finds more when its sentence is begun for it.
        n_tokens: the most tokens that the prompt may have; the prose ends with the last sentence that fits.

    Raises:
        ValueError: ``n_tokens`` leaves no room for the prose, or the answer does not occur in what fits.
    """
    sentences = _sentences(start=0)

    def build(n: int) -> list[int]:
        text = f"{_INTRODUCTION}{''.join(sentences[:n]).strip()}\n\n{question}"
        return chat_ids(tokenizer, text, lead_in)

    ids, count = _fit(build, len(sentences), n_tokens)
    text = "".join(sentences[:count])
    if answer not in text:
        raise ValueError(f"answer must occur in the prose that fits into n_tokens={n_tokens}, got {answer!r}")
    return Prompt(ids, question, lead_in, answer, text.index(answer) / len(text), 0)


def needle_prompt(tokenizer: PreTrainedTokenizerBase, *, n_tokens: int, depth: float, seed: int) -> Prompt:
    """Prose with one sentence that gives a secret seven-digit number, and the question for it.

    The seed chooses where in the prose the prompt begins, the number and whose number it is; equal arguments give equal
    prompts on every machine.

    Args:
        n_tokens: the most tokens that the prompt may have; fewer only by less than a sentence.
        depth: in [0, 1], where the needle stands: at the sentence border nearest to that share of the prose.

    Raises:
        ValueError: ``depth`` outside [0, 1], or an ``n_tokens`` that leaves no room.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must lie in [0, 1], got {depth}")
    draw = random.Random(seed)
    place, number = draw.choice(_PLACES), str(draw.randrange(10**6, 10**7))
    lead_in = f"The secret number of the {place} is"
    needle = f"{lead_in} {number}. "
    question = f"What is the secret number of the {place}?"
    sentences = _sentences(start=draw.random(), n_characters=12 * n_tokens)
    lengths = [len(sentence) for sentence in sentences]

    def build(n: int) -> list[int]:
        goal, at, seen = depth * sum(lengths[:n]), 0, 0
        while at < n and seen + lengths[at] / 2 <= goal:
            seen += lengths[at]
            at += 1
        text = "".join(sentences[:at]) + needle + "".join(sentences[at:n])
        return chat_ids(tokenizer, f"{_INTRODUCTION}{text.strip()}\n\n{question}", lead_in)

    ids, _ = _fit(build, len(sentences), n_tokens)
    return Prompt(ids, question, lead_in, number, depth, seed)


def needle_prompts(
    tokenizer: PreTrainedTokenizerBase, *, n_tokens: int, depths: Sequence[float], seeds: Sequence[int]
) -> list[Prompt]:
    """A needle prompt for each depth and seed; no two of them hide the same number."""
    return [
        needle_prompt(tokenizer, n_tokens=n_tokens, depth=depth, seed=1000 * seed + index)
        for seed in seeds
        for index, depth in enumerate(depths)
    ]


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str, lead_in: str = "") -> list[int]:
    """``text`` as a user's turn, up to where the assistant goes on after ``lead_in``.

    Without a chat template: the text, and the lead-in on a new line.
    """
    if tokenizer.chat_template is None:
        ids: list[int] = tokenizer(f"{text}\n{lead_in}" if lead_in else text).input_ids
        return ids
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(f"{turn}{lead_in}", add_special_tokens=False).input_ids
    return ids


def _sentences(start: float, n_characters: int = 0) -> list[str]:
    """The prose's sentences with the white space after them, rotated to ``start`` (a share of them).

    Repeated until they hold ``n_characters``; 0: once.
    """
    sentences: list[str] = _SENTENCE.findall(prose() + "\n\n")
    first = int(start * len(sentences))
    sentences = sentences[first:] + sentences[:first]
    return sentences * max(1, -(-n_characters // sum(map(len, sentences))))


def _fit(build: Callable[[int], list[int]], most: int, n_tokens: int) -> tuple[tuple[int, ...], int]:
    """``build(n)`` for the largest ``n <= most`` for which it is no longer than ``n_tokens``, and that ``n``."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if len(build(middle)) <= n_tokens:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise ValueError(f"n_tokens must leave room for the question and a sentence of prose, got {n_tokens}")
    return tuple(build(low)), low
