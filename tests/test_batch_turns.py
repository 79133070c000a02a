"""Several turns of a batch of unequal rows, through ``generate``: padding in front, in the middle, and at the end."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, References, Run, assert_chosen, streaming
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer import LightTransferCache

SETTINGS = {**WINDOW, "n_last": N_LAST, "page_size": 4}
PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 39))]
GREEDY: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def enabled(**settings: object) -> tuple[PreTrainedModel, References]:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, **{**SETTINGS, "full_layers": 2, **settings})
    return model, references


def real(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Each row's tokens without the padding."""
    return [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]


def extend(mask: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], n)], 1)


def check(references: References, out: Any, ids: torch.Tensor, mask: torch.Tensor, cut_at: list[int]) -> None:
    """Every logit of the last answer is the reference's over the row's real tokens."""
    rows = real(ids, mask)
    n_new = len(out.logits)
    answers = out.sequences[:, -n_new:].tolist()
    run = Run(
        [[*row, *answer] for row, answer in zip(rows, answers, strict=True)],
        [len(row) for row in rows],
        torch.stack(out.logits, 1),
        out.cache,
    )
    cuts = [dict.fromkeys(cut, at) for cut, at in zip(streaming(out.cache), cut_at, strict=True)]
    references.check(run, cuts)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("new_only", [False, True])
@pytest.mark.parametrize("turns", [(5, 1, 3), (4, 19, 30)])
@pytest.mark.parametrize("n_full", [0, 2])
def test_two_more_turns_of_a_padded_batch(
    n_full: int, turns: tuple[int, ...], new_only: bool, chunk: int | None
) -> None:
    """The last answer's token was not read yet: a shorter turn's padding stands behind it."""
    model, references = enabled(full_layers=n_full)
    ids, mask = tiny_models.left_pad(PROMPTS)
    cache = LightTransferCache(model.config)
    for at in range(3):
        n_cached = cache.get_seq_length()
        given = ids[:, n_cached:] if new_only else ids
        out = model.generate(
            given, attention_mask=mask, cache=cache, max_new_tokens=14, prefill_chunk_size=chunk, **GREEDY
        )
        check(references, out, ids, mask, [47, 30, 39])
        new, new_mask = tiny_models.left_pad([tiny_models.prompt(n, seed=60 + n + at) for n in turns])
        ids = torch.cat([ids, out.sequences[:, -14:], new], 1)
        mask = torch.cat([extend(mask, 14), new_mask], 1)


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_turn_chooses_on_its_last_real_queries(chunk: int | None) -> None:
    """Rows inside the window choose at their second turn, whose chunks split its padding."""
    model, references = enabled()
    prompts = [tiny_models.prompt(length, seed=70 + length) for length in (5, 3, 6)]
    ids, mask = tiny_models.left_pad(prompts)
    cache = LightTransferCache(model.config)
    out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=2, **GREEDY)
    assert streaming(cache) == [frozenset()] * 3
    new, new_mask = tiny_models.left_pad([tiny_models.prompt(n, seed=80 + n) for n in (20, 9, 5)])
    ids, mask = torch.cat([out.sequences, new], 1), torch.cat([extend(mask, 2), new_mask], 1)
    out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=20, prefill_chunk_size=chunk, **GREEDY)
    rows = real(ids, mask)
    for at, row in enumerate(rows):
        n_new = len(row) - len(prompts[at]) - 1
        assert_chosen(cache, at, references.choice(row, rule="lazy_ratio", n_full=2, n_last=min(N_LAST, n_new)))
    check(references, out, ids, mask, [len(row) for row in rows])


def answers(model: PreTrainedModel, prompts: list[list[int]], n: int) -> list[list[int]]:
    """What the rows say when nothing ends them."""
    ids, mask = tiny_models.left_pad(prompts)
    tokens: list[list[int]] = model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False).tolist()
    return [row[ids.shape[1] :] for row in tokens]


def until(answer: list[int], stop: int) -> list[int]:
    return answer[: answer.index(stop) + 1] if stop in answer else answer


def finish(model: PreTrainedModel, prompts: list[list[int]], n: int, stop: int) -> tuple[Any, torch.Tensor]:
    """Answers that end with ``stop``, and the mask of prompts and answers: what follows an end is padding."""
    ids, mask = tiny_models.left_pad(prompts)
    cache = LightTransferCache(model.config)
    out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=n, eos_token_id=stop, **GREEDY)
    is_end = (out.sequences[:, ids.shape[1] :] == stop).long()
    return out, torch.cat([mask, (is_end.cumsum(1) - is_end == 0).long()], 1)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("n_full", [0, 2, 5])
def test_rows_that_finish_early_find_their_last_tokens_in_the_next_turn(n_full: int, chunk: int | None) -> None:
    """The padding that generate feeds to finished rows must not push their tokens out of the rings."""
    model, references = enabled(full_layers=n_full)
    free = answers(model, PROMPTS, 20)
    stop = free[1][4]
    expected = [until(answer, stop) for answer in free]
    out, mask = finish(model, PROMPTS, 20, stop)
    ids, cache = out.sequences, out.cache
    assert [len(row) for row in real(ids, mask)] == [len(p) + len(a) for p, a in zip(PROMPTS, expected, strict=True)]
    assert len({len(answer) for answer in expected}) > 1
    assert min(map(len, expected)) < 20 - WINDOW_SIZE, "the padding must be long enough to fill a ring"
    for turn in range(2):
        new, new_mask = tiny_models.left_pad([tiny_models.prompt(n, seed=90 + n + turn) for n in (6, 11, 2)])
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, new_mask], 1)
        out = model.generate(
            ids, attention_mask=mask, cache=cache, max_new_tokens=14, prefill_chunk_size=chunk, **GREEDY
        )
        check(references, out, ids, mask, [47, 30, 39])
        ids, mask = out.sequences, extend(mask, 14)


def test_finished_rows_grow_no_more_and_cost_no_measure() -> None:
    """Beside them a row takes its deferred choice as if it were alone."""
    model, _ = enabled(policy="output_error", n_last=WINDOW["n_recent"])
    prompts = [tiny_models.prompt(5, seed=100), tiny_models.prompt(4, seed=150), PROMPTS[1]]
    ids, _ = tiny_models.left_pad(prompts)
    free = answers(model, prompts, 30)
    stop = next(token for token in free[1][2:6] if token not in free[0][:20])
    ends = [len(until(answer, stop)) for answer in free]
    out, _ = finish(model, prompts, 30, stop)
    alone, _ = finish(model, prompts[:1], 30, stop)
    assert out.sequences[0, ids.shape[1] :].tolist()[: ends[0]] == until(free[0], stop)
    assert out.cache.lengths == [len(p) + min(n, 29) for p, n in zip(prompts, ends, strict=True)]
    requests = out.cache.report().requests
    assert requests[1].bytes_held == 5 * -(-out.cache.lengths[1] // 4) * 1024  # layers, pages, bytes
    assert not requests[1].is_decided
    assert requests[0].streaming_layers == alone.cache.report().requests[0].streaming_layers != []


@torch.no_grad()
def test_after_generate_every_row_goes_on() -> None:
    model, references = enabled()
    free = answers(model, PROMPTS, 20)
    out, mask = finish(model, PROMPTS, 20, free[1][4])
    cache, rows, logits = out.cache, real(out.sequences, mask), []
    lengths = list(cache.lengths)
    rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    for step in range(20):
        tokens = [[(7 * step + 11 * row) % 90 + 2] for row in range(3)]
        positions = torch.tensor([[len(row)] for row in rows])
        logits.append(model(input_ids=torch.tensor(tokens), position_ids=positions, cache=cache).logits[:, -1])
        rows = [[*row, *token] for row, token in zip(rows, tokens, strict=True)]
    run = Run([[*row, 0] for row in rows], [n + 1 for n in lengths], torch.stack(logits, 1), cache)
    references.check(run, [dict.fromkeys(cut, at) for cut, at in zip(streaming(cache), (47, 30, 39), strict=True)])


def test_what_a_turn_says_of_old_tokens_must_be_true() -> None:
    model, _ = enabled()
    free = answers(model, PROMPTS, 20)
    out, mask = finish(model, PROMPTS, 20, free[1][4])
    new = torch.tensor([tiny_models.prompt(3, seed=row) for row in range(3)])
    ids = torch.cat([out.sequences, new], 1)
    before = list(out.cache.lengths)
    wrong = torch.ones_like(mask)
    wrong[:, :47] = mask[:, :47]
    with pytest.raises(ValueError, match=r"attention_mask must name the tokens that are cached.*rows \[1, 2\]"):
        model.generate(ids, attention_mask=extend(wrong, 3), cache=out.cache, max_new_tokens=2)
    gap = mask.clone()
    gap[0, 50] = 0
    with pytest.raises(ValueError, match=r"attention_mask must name the tokens that are cached.*rows \[0\]"):
        model.generate(ids, attention_mask=extend(gap, 3), cache=out.cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="attention_mask must be given"):
        model.generate(ids, attention_mask=torch.ones_like(ids), cache=out.cache, max_new_tokens=2)
    assert out.cache.lengths == before
    with pytest.raises(ValueError, match=r"tokens_to_remove must be at least 0.*padding"):
        out.cache.crop(-1)
    ids, mask = torch.cat([out.sequences, new], 1), extend(mask, 3)
    assert model.generate(ids, attention_mask=mask, cache=out.cache, max_new_tokens=2).shape[1] == ids.shape[1] + 2


@torch.no_grad()
@pytest.mark.parametrize("n_full", [2, 5])
def test_padding_that_was_read_by_hand_goes_where_it_can(n_full: int) -> None:
    """Decode steps by hand read every row; a later mask takes the last tokens back, unless a ring has lost others."""
    model, references = enabled(full_layers=n_full)
    prompts = [PROMPTS[0], tiny_models.prompt(4, seed=93)]
    ids, mask = tiny_models.left_pad(prompts)
    cache = LightTransferCache(model.config)

    def feed(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions, cache=cache).logits[:, -1]

    feed(ids, mask)
    void = 0 if n_full == 5 else 1  # the row whose last two tokens are padding
    for token in (7, 8, 9):
        mask = extend(mask, 1)
        feed(torch.tensor([[token], [token]]), mask)
    mask[void, -2:] = 0
    turn = torch.tensor([[11, 12, 13], [14, 15, 16]])
    if n_full == 2:  # the other way round it cannot be done
        wrong = mask.clone()
        wrong[:, -2:] = torch.tensor([[0, 0], [1, 1]])
        with pytest.raises(ValueError, match=r"attention_mask.*last \[2\] cached tokens of rows \[0\]"):
            feed(turn, extend(wrong, 3))
        assert cache.lengths == [50, 7]
    mask = extend(mask, 3)
    logits = [feed(turn, mask)]
    rows = [[*prompts[0], 7, 8, 9, 11, 12, 13], [*prompts[1], 7, 8, 9, 14, 15, 16]]
    del rows[void][-5:-3]
    lengths = [len(row) for row in rows]
    for step in range(24):
        tokens = torch.tensor([[(7 * step) % 90 + 2], [(5 * step) % 90 + 2]])
        mask = extend(mask, 1)
        logits.append(feed(tokens, mask))
        rows = [[*row, *token] for row, token in zip(rows, tokens.tolist(), strict=True)]
    run = Run([[*row, 0] for row in rows], lengths, torch.stack(logits, 1), cache)
    cut = streaming(cache)
    references.check(run, [dict.fromkeys(cut[0], 47), dict.fromkeys(cut[1], 2 * WINDOW_SIZE + 1)])
