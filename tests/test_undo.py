"""Tokens taken back by ``crop``: the cache goes on as if it had never seen them."""

from __future__ import annotations

import hybrid_runs as runs
import pytest
import tiny_models
import torch

import lighttransfer
from lighttransfer import LightTransferCache

SETTINGS = {"full_layers": 1, "n_sink": 2, "n_recent": 5, "n_last": 4, "page_size": 4}
PROMPTS = torch.tensor([tiny_models.prompt(24, seed=1), tiny_models.prompt(24, seed=2)])
PADDING = torch.tensor([[0] * 6 + [1] * 18, [1] * 24])
LATER = torch.tensor([tiny_models.prompt(40, seed=3), tiny_models.prompt(40, seed=4)])


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return lighttransfer.enable(tiny_models.build(tiny_models.ARCHITECTURES[request.param]()), **SETTINGS)


def read(model: torch.nn.Module, cache: LightTransferCache, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.cat([PADDING, torch.ones(2, max(0, cache.get_seq_length() + ids.shape[1] - 24))], dim=1)
    return model(input_ids=ids, attention_mask=mask[:, : cache.get_seq_length() + ids.shape[1]], cache=cache).logits


@torch.no_grad()
@pytest.mark.parametrize("calls", [(1, 1, 1, 1, 1, 1, 1), (7,), (3, 1, 1, 2), (1, 5, 1)])
@pytest.mark.parametrize("n_back", [0, 1, 2, 4, 7])
def test_what_is_taken_back_leaves_no_trace(model: torch.nn.Module, calls: tuple[int, ...], n_back: int) -> None:
    cache, untouched = LightTransferCache(model.config), LightTransferCache(model.config)
    for each in (cache, untouched):
        read(model, each, PROMPTS)
        read(model, each, LATER[:, :3])
    assert all(request.streaming_layers for request in cache.report().requests)
    cache.activate_past_recording()
    assert cache.is_croppable
    done = 3
    for n in calls:
        read(model, cache, LATER[:, done : done + n])
        done += n
    cache.crop(-n_back)
    done -= n_back
    for at in range(3, done):
        read(model, untouched, LATER[:, at : at + 1])
    assert cache.lengths == untouched.lengths
    assert cache.get_seq_length() == untouched.get_seq_length()
    assert [r.bytes_held for r in cache.report().requests] == [r.bytes_held for r in untouched.report().requests]
    for at in range(done, done + 9):
        expected = read(model, untouched, LATER[:, at : at + 1])
        torch.testing.assert_close(read(model, cache, LATER[:, at : at + 1]), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_only_what_was_recorded_comes_back(model: torch.nn.Module) -> None:
    cache = LightTransferCache(model.config)
    read(model, cache, PROMPTS)
    read(model, cache, LATER[:, :1])
    cache.activate_past_recording()
    read(model, cache, LATER[:, 1:3])
    before = list(cache.lengths)
    with pytest.raises(ValueError, match=r"tokens_to_remove.*ring has wrapped"):
        cache.crop(-3)
    assert cache.lengths == before
    cache.crop(-2)
    with pytest.raises(ValueError, match=r"tokens_to_remove.*ring has wrapped"):
        cache.crop(-1)
    cache.stop_recording()
    assert not cache.is_croppable


def state(cache: LightTransferCache) -> tuple[object, ...]:
    tables = [layer.blocks.flush().clone() for layer in cache.layers]
    (pool,) = cache.pools.values()
    return list(cache.lengths), cache.get_seq_length(), pool.n_used, tables, pool.k.clone(), pool.v.clone()


@torch.no_grad()
@pytest.mark.parametrize("left", [0, 1, 2, 3, 20])
def test_a_wrapped_ring_goes_back_to_its_sinks_and_not_elsewhere(left: int) -> None:
    """Its sinks are the only old tokens that it never overwrites. A layer that was cut stays cut."""
    model = tiny_models.build(tiny_models.llama())
    references = runs.References(model)
    lighttransfer.enable(model, **SETTINGS)
    cache = LightTransferCache(model.config)

    def feed(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, cache=cache).logits

    feed(PROMPTS)
    feed(LATER[:, :3])
    before = state(cache)
    if left > SETTINGS["n_sink"]:
        with pytest.raises(ValueError, match=rf"must be at least 0.*more than its 2 sinks, got {left - 27}.*\[0, 1\]"):
            cache.crop(left - 27)
        after = state(cache)
        assert after[:3] == before[:3]
        assert all(torch.equal(a, b) for a, b in zip(before[3], after[3], strict=True))
        assert torch.equal(after[4], before[4])
        assert torch.equal(after[5], before[5])
        return
    cut = runs.streaming(cache)
    cache.crop(left - 27)
    assert cache.lengths == [left, left]
    assert cache.get_seq_length() == left
    assert runs.streaming(cache) == cut
    logits = [feed(LATER[:, :9])[:, -1], *(feed(LATER[:, at : at + 1])[:, -1] for at in range(9, 30))]
    rows = [[*PROMPTS[row, :left].tolist(), *LATER[row, :30].tolist(), 0] for row in range(2)]
    run = runs.Run(rows, [left + 9] * 2, torch.stack(logits, 1), cache)
    references.check(run, [dict.fromkeys(layers, left) for layers in cut], window={"n_sink": 2, "n_recent": 5})


@torch.no_grad()
def test_a_native_window_has_no_sinks_to_go_back_to() -> None:
    model = lighttransfer.enable(tiny_models.build(tiny_models.gemma3()), **SETTINGS)
    cache = LightTransferCache(model.config)
    first = model(input_ids=PROMPTS, cache=cache).logits
    for left in (1, 2):
        with pytest.raises(ValueError, match=r"more than its 0 sinks"):
            cache.crop(left - 24)
    with pytest.raises(ValueError, match=r"must be at least -24.*got -25"):
        cache.crop(-25)
    cache.crop(-24)
    assert cache.get_seq_length() == 0
    cache.reset()
    assert torch.equal(model(input_ids=PROMPTS, cache=cache).logits, first)


@torch.no_grad()
def test_rows_that_have_not_wrapped_count_less_while_others_go_back_to_their_sinks() -> None:
    model = tiny_models.build(tiny_models.llama())
    references = runs.References(model)
    lighttransfer.enable(model, **SETTINGS, policy="first")
    cache = LightTransferCache(model.config)
    prompts = [tiny_models.prompt(7, seed=5), tiny_models.prompt(8, seed=6)]
    ids, mask = tiny_models.left_pad(prompts)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
    with pytest.raises(ValueError, match=r"in rows \[1\]"):
        cache.crop(-5)
    cache.crop(-6)
    assert cache.lengths == [1, 2]
    logits = []
    for at in range(30):
        step = LATER[:, at : at + 1]
        logits.append(model(input_ids=step, position_ids=torch.tensor([[1 + at], [2 + at]]), cache=cache).logits[:, -1])
    rows = [[*prompt[: row + 1], *LATER[row, :30].tolist(), 0] for row, prompt in enumerate(prompts)]
    run = runs.Run(rows, [2, 3], torch.stack(logits, 1), cache)
    references.check(run, [dict.fromkeys(range(1, 5), 0)] * 2, window={"n_sink": 2, "n_recent": 5})


@torch.no_grad()
@pytest.mark.parametrize("order", [[1, 0], [0, 0, 1], [1]])
def test_what_was_recorded_does_not_outlive_a_change_of_rows(model: torch.nn.Module, order: list[int]) -> None:
    """It belongs to rows as they stood: written back into other rows it would falsify them."""
    cache = LightTransferCache(model.config)
    read(model, cache, PROMPTS)
    read(model, cache, LATER[:, :1])
    cache.activate_past_recording()
    read(model, cache, LATER[:, 1:4])
    cache.reorder_cache(torch.tensor(order))
    with pytest.raises(ValueError, match="ring has wrapped"):
        cache.crop(-1)
    assert cache.lengths == [(22, 28)[row] for row in order]


@torch.no_grad()
def test_reset_ends_the_recording(model: torch.nn.Module) -> None:
    cache = LightTransferCache(model.config)
    read(model, cache, PROMPTS)
    cache.activate_past_recording()
    read(model, cache, LATER[:, :1])
    cache.reset()
    read(model, cache, PROMPTS)
    with cache.decode_step():  # refused while calls are recorded
        read(model, cache, LATER[:, :1])
