"""The other ways to run generate: chunked prefill, turns, beams, sampling, speculation, short prompts, streamers."""

from __future__ import annotations

import hybrid_runs as runs
import pytest
import reference_model as ref
import tiny_models
import torch
import transformers
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, References, Run, cuts_after_prefill, streaming
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer.cache import LightTransferCache

SETTINGS = {**WINDOW, "n_last": N_LAST}
PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 39))]
EQUAL = [tiny_models.prompt(40, seed=seed) for seed in (21, 22)]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_models.build(tiny_models.llama())


def enable(model: PreTrainedModel, **settings: object) -> References:
    references = References(model)
    lighttransfer.enable(model, **{**SETTINGS, "full_layers": 2, **settings})
    return references


@pytest.mark.parametrize("chunk", [1, 5, 16, 46])
def test_chunked_prefill_is_the_unchunked_one(model: PreTrainedModel, chunk: int) -> None:
    references = enable(model)
    whole = runs.generate(model, PROMPTS, 12)
    run = runs.generate(model, PROMPTS, 12, prefill_chunk_size=chunk)
    for row, prompt in enumerate(PROMPTS):
        runs.assert_chosen(run.cache, row, references.choice(prompt, rule="lazy_ratio", n_full=2))
    assert run.answers == whole.answers
    references.check(run, cuts_after_prefill(run))


@pytest.mark.parametrize("num_beams", [2, 4])
def test_beam_search(model: PreTrainedModel, num_beams: int) -> None:
    references = enable(model)
    choices = [references.choice(prompt, rule="lazy_ratio", n_full=2) for prompt in EQUAL]
    assert choices[0].streaming != choices[1].streaming
    kwargs = {"num_beams": num_beams, "num_return_sequences": 2, "max_new_tokens": 20, "do_sample": False}
    ids = torch.tensor(EQUAL)
    cut_at = [dict.fromkeys(choice.streaming, ids.shape[1]) for choice in choices]
    expected = references.exact.generate(ids, cut_at=cut_at, **WINDOW, **kwargs)
    uncut = references.exact.generate(ids, cut_at=[{}, {}], **WINDOW, **kwargs)
    assert not torch.equal(expected, uncut), "the cut must matter to test anything"
    assert torch.equal(model.generate(ids, **kwargs), expected)


MOVES = {
    "reorder_cache": lambda cache: (cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "batch_select_indices": lambda cache: (cache.batch_select_indices(torch.tensor([2, 0, 1, 0])), [2, 0, 1, 0]),
    "mask": lambda cache: (cache.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
    "batch_repeat_interleave": lambda cache: (cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@torch.no_grad()
@pytest.mark.parametrize("move", MOVES)
def test_rows_move_with_their_choice_and_write_to_pages_of_their_own(model: PreTrainedModel, move: str) -> None:
    """Rows that chose differently and one whose choice is open change places; copies then go their own ways."""
    references = enable(model, page_size=4)
    prompts = [*PROMPTS[:2], tiny_models.prompt(5, seed=1)]
    cache = LightTransferCache(model.config)
    ids, mask = tiny_models.left_pad(prompts)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    settings = {"past_key_values": cache, "use_cache": True}
    model(input_ids=ids, attention_mask=mask, position_ids=positions, **settings)
    assert streaming(cache)[0] != streaming(cache)[1]
    assert not cache.report().requests[2].is_decided

    _, source = MOVES[move](cache)
    rows = [list(prompts[row]) for row in source]
    logits = []
    for step in range(25):
        tokens = [[(7 * step + 11 * at) % 90 + 2] for at in range(len(rows))]
        positions = torch.tensor([[len(row)] for row in rows])
        logits.append(model(input_ids=torch.tensor(tokens), position_ids=positions, **settings).logits[:, -1])
        rows = [[*row, *token] for row, token in zip(rows, tokens, strict=True)]
    lengths = [len(prompts[row]) + 1 for row in source]
    run = Run([[*row, 0] for row in rows], lengths, torch.stack(logits, 1), cache)
    at = [2 * WINDOW_SIZE + 1 if row == 2 else len(prompts[row]) for row in source]
    references.check(run, [dict.fromkeys(cut, at) for cut, at in zip(streaming(cache), at, strict=True)])


def test_sampling_with_several_sequences_per_prompt(model: PreTrainedModel) -> None:
    references = enable(model)
    choices = [references.choice(prompt, rule="lazy_ratio", n_full=2) for prompt in EQUAL]
    kwargs = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 20}
    ids = torch.tensor(EQUAL)
    cut_at = [dict.fromkeys(choice.streaming, ids.shape[1]) for choice in choices]
    torch.manual_seed(7)
    out = model.generate(ids, return_dict_in_generate=True, output_logits=True, **kwargs)
    assert len({tuple(row) for row in out.sequences.tolist()}) > 2
    rows = [row.tolist() for row in out.sequences]
    run = Run(rows, [40] * 6, torch.stack(out.logits, 1), out.cache)
    references.check(run, [cut for cut in cut_at for _ in range(3)])


SPECULATION = {
    "prompt_lookup": lambda: {"prompt_lookup_num_tokens": 5},
    "assistant": lambda: {"assistant_model": assistant()},
}


def assistant() -> PreTrainedModel:
    """Another model: most of its drafts are rejected, so the cache is cropped in nearly every step."""
    return tiny_models.build(tiny_models.llama(), seed=1)


@pytest.mark.parametrize("mode", SPECULATION)
@pytest.mark.parametrize("full_layers", [5, 2])
def test_speculation_gives_the_greedy_tokens(model: PreTrainedModel, mode: str, full_layers: int) -> None:
    """Rejected drafts put back what they overwrote in the rings."""
    enable(model, full_layers=full_layers)
    ids = torch.tensor([tiny_models.prompt(9, seed=3) * 5])
    expected = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False, **SPECULATION[mode]()), expected)


@torch.no_grad()
def test_crop(model: PreTrainedModel) -> None:
    """Tokens come back out of full layers and out of rings that have not wrapped; else the cache says why not."""
    enable(model, policy="first")
    cache = LightTransferCache(model.config)

    def feed(tokens: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0, -1]

    feed([5, 6, 7])
    expected = feed([8])
    cache.crop(-1)
    feed([9])
    feed([10])
    cache.crop(-2)
    assert cache.get_seq_length() == 3
    assert torch.equal(feed([8]), expected)
    for token in range(20, 25):
        feed([token])
    assert not cache.is_croppable
    with pytest.raises(ValueError, match=r"tokens_to_remove.*ring has wrapped"):
        cache.crop(-1)
    assert cache.get_seq_length() == 9
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(1)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[20, 27], [1] * 3 + [44], [46, 1]])
@pytest.mark.parametrize("announced", [True, False])
def test_chunks_by_hand(model: PreTrainedModel, chunks: list[int], announced: bool) -> None:
    references = enable(model)
    prompt = PROMPTS[0]
    choice = references.choice(prompt, rule="lazy_ratio", n_full=2)
    cache = LightTransferCache(model.config, prompt_length=len(prompt) if announced else None)
    if not announced:
        cache.begin_prefill()
    done, logits = 0, torch.empty(0)
    for size in chunks:
        chunk = torch.tensor([prompt[done : done + size]])
        logits = model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[0, -1]
        done += size
        assert not streaming(cache)[0] or done == len(prompt)
    if not announced:
        cache.end_prefill()
    runs.assert_chosen(cache, 0, choice)
    answer = tiny_models.prompt(12, seed=33)
    steps = [model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True) for token in answer]
    run = Run(
        [[*prompt, *answer, 0]], [len(prompt)], torch.stack([logits, *(x.logits[0, -1] for x in steps)])[None], cache
    )
    references.check(run, [dict.fromkeys(choice.streaming, len(prompt))])


@torch.no_grad()
@pytest.mark.parametrize("turn", [1, 5, 30])
def test_second_turn_on_one_cache(model: PreTrainedModel, turn: int) -> None:
    """New tokens after an answer: a chunk shorter and longer than the window, at its true positions."""
    references = enable(model)
    first = runs.generate(model, [PROMPTS[0]], 6, past_key_values=LightTransferCache(model.config))
    row = [*first.rows[0], *tiny_models.prompt(turn, seed=50)]
    second = runs.generate(model, [row], 20, past_key_values=first.cache)
    assert streaming(second.cache) == streaming(first.cache)
    references.check(second, [dict.fromkeys(streaming(first.cache)[0], first.lengths[0])])


@torch.no_grad()
@pytest.mark.parametrize("n_full", [0, 2])
def test_second_turn_of_a_padded_batch(model: PreTrainedModel, n_full: int) -> None:
    """New chunks of unequal length: their padding stands between a row's cached tokens and its new ones."""
    references = enable(model, full_layers=n_full)
    cache = LightTransferCache(model.config)
    turns = [PROMPTS, *([[token]] * 3 for token in (5, 6, 7)), [tiny_models.prompt(n, seed=60 + n) for n in (5, 1, 19)]]
    turns += [[[token]] * 3 for token in tiny_models.prompt(20, seed=61)]
    seen, logits = torch.zeros(3, 0, dtype=torch.long), []
    for turn in turns:
        ids, mask = tiny_models.left_pad(turn)
        seen = torch.cat([seen, mask], 1)
        positions = (seen.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        out = model(input_ids=ids, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True)
        logits.append(out.logits[:, -1])
    rows = [[token for turn in turns for token in turn[row]] for row in range(3)]
    lengths = [len(row) - 20 for row in rows]
    run = Run([[*row, 0] for row in rows], lengths, torch.stack(logits[4:], 1), cache)
    cuts = [dict.fromkeys(cut, len(prompt)) for cut, prompt in zip(streaming(cache), PROMPTS, strict=True)]
    references.check(run, cuts)


def test_padding_behind_a_real_token_is_refused(model: PreTrainedModel) -> None:
    enable(model)
    ids, mask = tiny_models.left_pad(PROMPTS)
    with pytest.raises(ValueError, match=r"left-padded.*rows \[1, 2\]"):
        model.generate(ids.flip(1), attention_mask=mask.flip(1), max_new_tokens=2, do_sample=False)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["lazy_ratio", "nonsink_peak"])
@pytest.mark.parametrize("length", [1, 5, WINDOW_SIZE])
def test_a_short_prompt_is_decided_once_it_has_outgrown_the_window_twice(
    model: PreTrainedModel, rule: str, length: int
) -> None:
    references = enable(model, policy=rule)
    prompt, answer = tiny_models.prompt(length, seed=31), tiny_models.prompt(5 * WINDOW_SIZE, seed=32)
    cache = LightTransferCache(model.config)
    logits, cut_at = [], None
    for tokens in (prompt, *([token] for token in answer)):
        logits.append(model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0, -1])
        if cut_at is None and streaming(cache)[0]:
            cut_at = cache.get_seq_length()
    assert cut_at == 2 * WINDOW_SIZE + 1
    row = [*prompt, *answer]
    choice = ref.choose(
        references.exact.run(row[:cut_at]), cut_at, rule=rule, n_full=2, n_last=N_LAST, rolling=True, **WINDOW
    )
    assert choice.gap > 2e-5
    runs.assert_chosen(cache, 0, choice)
    run = Run([[*row, 0]], [length], torch.stack(logits)[None], cache)
    references.check(run, [dict.fromkeys(choice.streaming, cut_at)])


def test_inference_mode_and_streamer(model: PreTrainedModel) -> None:
    enable(model)
    expected = runs.generate(model, PROMPTS[:1], 12).answers[0]
    seen: list[int] = []

    class Collect(transformers.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    ids = torch.tensor(PROMPTS[:1])
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=12, do_sample=False, streamer=Collect())
    assert seen == [*PROMPTS[0], *expected, -1]


def test_stopping_criteria(model: PreTrainedModel) -> None:
    enable(model)
    expected = runs.generate(model, PROMPTS[:1], 12).rows[0]

    class Stop(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 52)

    out = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=12, do_sample=False, stopping_criteria=[Stop()])
    assert out[0].tolist() == expected[:52]
