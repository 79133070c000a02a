"""Full layers that are cut later, when memory asks for it: while decoding, and at the end of a later turn."""

from __future__ import annotations

from typing import Any

import hybrid_runs as runs
import pytest
import reference_model as ref
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, References, Run, streaming
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer import LightTransferCache
from lighttransfer.cache import prompt_choice
from lighttransfer.selection import StaticLayers

PAGE = 4
PAGE_BYTES = PAGE * 2 * 2 * 16 * 4  # tokens, sides, KV heads, head_dim, float32
N_LAYERS = 5
SETTINGS = {**WINDOW, "n_last": N_LAST, "full_layers": 3, "page_size": PAGE}
PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 39))]
STEPS = 52


def enabled(**settings: object) -> tuple[PreTrainedModel, References]:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, **{**SETTINGS, **settings})
    return model, references


def pages(n_full: int, length: int) -> int:
    """Of one row, counted on paper."""
    return n_full * -(-length // PAGE) + (N_LAYERS - n_full) * -(-min(length, WINDOW_SIZE) // PAGE)


class Expected:
    """What a row keeps, worked out from the float64 model alone."""

    def __init__(self, references: References, rule: str, n_last: int) -> None:
        self.references, self.rule, self.n_last = references, rule, n_last
        self.full = set(range(N_LAYERS))
        self.cut_at: dict[int, int] = {}
        self.scores: dict[int, float] = {}

    def choose(self, row: list[int], n_keep: int, n_queries: int, *, rolling: bool) -> None:
        """Keeps ``n_keep`` of the layers that are still full; ``row`` are the tokens so far."""
        layers = self.references.exact.run(row, cut_at=self.cut_at, **WINDOW).layers
        n = min(self.n_last, n_queries)
        kept = ref.kept_keys(len(row), n_last=n, rolling=rolling and self.rule != "output_error", **WINDOW)
        score, largest = ref._RULES[self.rule]
        scores = {layer: score(layers[layer], kept, WINDOW["n_sink"]) for layer in self.full}
        order = sorted(self.full, key=lambda i: (-scores[i] if largest else scores[i], -i))
        if 0 < n_keep < len(order):
            gap = abs(scores[order[n_keep - 1]] - scores[order[n_keep]])
            assert gap > 1e-5, "near-tie: choose another prompt"  # a score may be off by 5e-6
        self.scores |= scores
        self.cut_at |= dict.fromkeys(order[n_keep:], len(row))
        self.full = set(order[:n_keep])

    def look(self, row: list[int], ahead: int, n_pages: int, n_queries: int, *, rolling: bool) -> None:
        """Cuts what does not fit in ``n_pages`` until the row has ``ahead`` more tokens."""
        n_keep = len(self.full)
        while n_keep and pages(n_keep, len(row) + ahead) > n_pages:
            n_keep -= 1
        if n_keep < len(self.full):
            self.choose(row, n_keep, n_queries, rolling=rolling)

    def assert_equal(self, cache: LightTransferCache, row: int) -> None:
        request = cache.report().requests[row]
        assert set(request.full_layers) == self.full
        assert request.scores.keys() == self.scores.keys()
        for layer, score in self.scores.items():
            assert abs(request.scores[layer] - score) < 5e-6, f"layer {layer}: {request.scores[layer]}, {score}"


def feed(model: PreTrainedModel, cache: LightTransferCache, turns: list[list[int]], seen: torch.Tensor) -> Any:
    """Left-padded new tokens; the mask so far and the logits of each row's last token."""
    ids, mask = tiny_models.left_pad(turns)
    seen = torch.cat([seen, mask], 1)
    positions = (seen.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True)
    return seen, out.logits[:, -1]


@pytest.mark.parametrize("rule", ["lazy_ratio", "nonsink_peak", "output_error"])
@pytest.mark.parametrize(("every", "n_pages"), [(3, 44), (10, 44), (16, 20)])
def test_layers_are_cut_while_decoding(rule: str, every: int, n_pages: int) -> None:
    """Three rows that choose, outgrow their bytes and are cut each at its own time; tokens are the reference's."""
    n_last = WINDOW["n_recent"] if rule == "output_error" else N_LAST
    model, references = enabled(policy=rule, n_last=n_last, reselect_every=every, reselect_bytes=n_pages * PAGE_BYTES)
    answers = [tiny_models.prompt(STEPS, seed=70 + row) for row in range(3)]
    expected = [Expected(references, rule, n_last) for _ in PROMPTS]
    for each, prompt in zip(expected, PROMPTS, strict=True):
        each.choose(prompt, 3, len(prompt), rolling=False)
    cache = LightTransferCache(model.config)
    seen, first = feed(model, cache, PROMPTS, torch.zeros(3, 0, dtype=torch.long))
    logits = [first]
    for step in range(STEPS):
        seen, out = feed(model, cache, [[answer[step]] for answer in answers], seen)
        logits.append(out)
        for row, each in enumerate(expected):
            if (step + 1) % every == 0:
                tokens = [*PROMPTS[row], *answers[row][: step + 1]]
                each.look(tokens, every, n_pages, step + 1, rolling=True)
            each.assert_equal(cache, row)
            if step + 1 >= every and each.full:
                assert cache.report().requests[row].bytes_held <= n_pages * PAGE_BYTES
    assert len({tuple(sorted(each.cut_at.items())) for each in expected}) == 3, "the rows must differ"
    assert all(len(set(each.cut_at.values())) > 1 for each in expected), "nothing was cut later"
    rows = [[*prompt, *answer, 0] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    run = Run(rows, [len(prompt) for prompt in PROMPTS], torch.stack(logits, 1), cache)
    references.check(run, [each.cut_at for each in expected])


def test_a_deferred_choice_is_followed_by_looks_of_its_own() -> None:
    model, references = enabled(reselect_every=5, reselect_bytes=30 * PAGE_BYTES)
    prompt, answer = tiny_models.prompt(5, seed=80), tiny_models.prompt(STEPS, seed=81)
    expected = Expected(references, "lazy_ratio", N_LAST)
    cache = LightTransferCache(model.config)
    seen, first = feed(model, cache, [prompt], torch.zeros(1, 0, dtype=torch.long))
    logits, due = [first], 2 * WINDOW_SIZE + 1
    for step, token in enumerate(answer):
        seen, out = feed(model, cache, [[token]], seen)
        logits.append(out)
        row = [*prompt, *answer[: step + 1]]
        if len(row) == due:
            expected.choose(row, 3, step + 1, rolling=True)
        elif len(row) > due and (len(row) - due) % 5 == 0:
            expected.look(row, 5, 30, step + 1, rolling=True)
        expected.assert_equal(cache, 0)
    assert len(set(expected.cut_at.values())) > 1, "nothing was cut later"
    references.check(Run([[*prompt, *answer, 0]], [5], torch.stack(logits, 1), cache), [expected.cut_at])


def test_enough_memory_cuts_nothing() -> None:
    model, _ = enabled()
    expected = runs.generate(model, PROMPTS, 40)
    lighttransfer.enable(model, reselect_every=4, reselect_turns=True, reselect_bytes=10**9)
    run = runs.generate(model, PROMPTS, 40)
    assert streaming(run.cache) == streaming(expected.cache)
    assert torch.equal(run.logits, expected.logits)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rule", ["lazy_ratio", "nonsink_peak"])
@pytest.mark.parametrize("turns", [(5, 3, 4), (30, 21, 17), (30, 1, 5)])
def test_a_later_turn_chooses_among_the_layers_that_are_full(
    monkeypatch: pytest.MonkeyPatch, rule: str, turns: tuple[int, ...], late: bool
) -> None:
    """Turns shorter and longer than the window, of a batch whose rows differ."""
    if late:
        monkeypatch.setattr(prompt_choice, "reads_late", lambda scores: True)
        monkeypatch.setattr(prompt_choice, "Reading", LateReading)
    model, references = enabled(policy=rule, reselect_turns=True, reselect_bytes=38 * PAGE_BYTES)
    expected = [Expected(references, rule, N_LAST) for _ in PROMPTS]
    new = [tiny_models.prompt(n, seed=90 + n) for n in turns]
    cache = LightTransferCache(model.config)
    seen, _ = feed(model, cache, PROMPTS, torch.zeros(3, 0, dtype=torch.long))
    rows = [list(prompt) for prompt in PROMPTS]
    for each, row in zip(expected, rows, strict=True):
        each.choose(row, 3, len(row), rolling=False)
    for step in range(9):  # decode steps alone choose nothing
        tokens = [[(5 * step + 3 * row) % 90 + 2] for row in range(3)]
        seen, _ = feed(model, cache, tokens, seen)
        rows = [[*row, *token] for row, token in zip(rows, tokens, strict=True)]
    for at, each in enumerate(expected):
        each.assert_equal(cache, at)
    seen, first = feed(model, cache, new, seen)
    rows = [[*row, *turn] for row, turn in zip(rows, new, strict=True)]
    for at, (each, row, turn) in enumerate(zip(expected, rows, new, strict=True)):
        each.look(row, 0, 38, len(turn), rolling=False)
        each.assert_equal(cache, at)
    assert sum(len(set(each.cut_at.values())) > 1 for each in expected) > 1, "the turn cut nothing"
    logits, lengths = [first], [len(row) for row in rows]
    for step in range(3 * WINDOW_SIZE):
        tokens = [[(7 * step + 11 * row) % 90 + 2] for row in range(3)]
        seen, out = feed(model, cache, tokens, seen)
        logits.append(out)
        rows = [[*row, *token] for row, token in zip(rows, tokens, strict=True)]
    run = Run([[*row, 0] for row in rows], lengths, torch.stack(logits, 1), cache)
    references.check(run, [each.cut_at for each in expected])


class LateReading:
    """Scores as a GPU gives them, one layer late."""

    def __init__(self, scores: torch.Tensor) -> None:
        self._scores = scores.clone()

    def wait(self) -> list[float]:
        values: list[float] = self._scores.tolist()
        return values


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("new_only", [False, True])
@pytest.mark.parametrize("turn", [4, 30])
def test_a_turn_through_generate(turn: int, new_only: bool, chunk: int | None) -> None:
    """The full ids again, or the new tokens alone; at once, or in chunks."""
    model, references = enabled(reselect_turns=True, reselect_bytes=42 * PAGE_BYTES)
    first = runs.generate(model, [PROMPTS[0]], 6, past_key_values=LightTransferCache(model.config))
    expected = Expected(references, "lazy_ratio", N_LAST)
    expected.choose(PROMPTS[0], 3, 47, rolling=False)
    expected.assert_equal(first.cache, 0)
    row = [*first.rows[0], *tiny_models.prompt(turn, seed=50)]
    cached = first.cache.get_seq_length()
    given = row[cached:] if new_only else row
    mask = torch.ones(1, len(row), dtype=torch.long)
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(
        torch.tensor([given]), attention_mask=mask, cache=first.cache, prefill_chunk_size=chunk, **options
    )
    expected.look(row, 0, 42, turn + 1, rolling=False)
    assert 0 < len(expected.full) < 3
    expected.assert_equal(out.cache, 0)
    answer = out.sequences[0, len(given) :].tolist()
    run = Run([[*row, *answer]], [len(row)], torch.stack(out.logits, 1), out.cache)
    references.check(run, [expected.cut_at])


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"reselect_every": 4}, ValueError, "reselect_bytes"),
        ({"reselect_turns": True}, ValueError, "reselect_bytes"),
        ({"reselect_bytes": 4096}, ValueError, "reselect_every or reselect_turns"),
        ({"reselect_every": 0, "reselect_bytes": 4096}, ValueError, "reselect_every"),
        ({"reselect_every": 2.5, "reselect_bytes": 4096}, TypeError, "reselect_every"),
        ({"reselect_every": 4, "reselect_bytes": 0}, ValueError, "reselect_bytes"),
        ({"reselect_turns": 1, "reselect_bytes": 4096}, TypeError, "reselect_turns"),
        ({"reselect_every": 4, "reselect_bytes": 4096, "policy": StaticLayers([0])}, ValueError, "policy"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    model = tiny_models.build(tiny_models.llama())
    with pytest.raises(error, match=match):
        lighttransfer.enable(model, **{**SETTINGS, **settings})
    assert not hasattr(model.config, "lighttransfer")
