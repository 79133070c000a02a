"""Tokens taken back by ``crop``: the cache goes on as if it had never seen them."""

from __future__ import annotations

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
    with pytest.raises(NotImplementedError, match="ring has wrapped"):
        cache.crop(-3)
    assert cache.lengths == before
    cache.crop(-2)
    with pytest.raises(NotImplementedError, match="ring has wrapped"):
        cache.crop(-1)
    cache.stop_recording()
    assert not cache.is_croppable
