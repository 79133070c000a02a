"""A model spread over several devices: one pool on each, with room for its own layers. The second device is torch's
``meta``, which runs the ops' shapes and no more."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE

import lighttransfer
from lighttransfer import LightTransferCache
from lighttransfer.cache.budget import prompt_pages
from lighttransfer.cache.calls import Call, PromptStep
from lighttransfer.integration.placement import layer_devices

PAGE = 4
SETTINGS = {**WINDOW, "n_last": N_LAST, "page_size": PAGE}
LENGTHS = [47, 30]


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def prompt(cache: LightTransferCache, devices: list[str]) -> None:
    """A prompt through the cache, with every layer's tensors on its device."""
    read(cache, devices, 47, torch.arange(47)[None] >= torch.tensor([[0], [17]]))


def read(cache: LightTransferCache, devices: list[str], n_tokens: int, mask: torch.Tensor) -> None:
    for layer, device in zip(cache.attention_layers, devices, strict=True):
        q, k = torch.zeros(2, 4, n_tokens, 16, device=device), torch.zeros(2, 2, n_tokens, 16, device=device)
        keys, values = cache.update(k, k, layer.index)
        call = Call(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), None, None)
        assert cache.attend(layer, call, mask).device.type == device


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("n_cpu", [1, 2, 4])
def test_each_pool_makes_room_for_its_own_layers(n_cpu: int, is_told: bool) -> None:
    devices = ["cpu"] * n_cpu + ["meta"] * (5 - n_cpu)
    told = devices if is_told else None
    cache = LightTransferCache(tiny_models.llama(), policy="first", full_layers=2, devices=told, **SETTINGS)
    prompt(cache, devices)
    whole = sum(map(pages, LENGTHS))
    ring = len(LENGTHS) * pages(WINDOW_SIZE)
    n_pages = {pool.device.type: pool.n_pages for pool in cache.pools.values()}
    n_full = min(n_cpu, 2)
    expected = n_full * whole + (n_cpu - n_full) * ring if is_told else 2 * whole + 3 * ring
    assert n_pages["cpu"] == expected
    assert n_pages["meta"] == (2 - n_full) * whole + (5 - n_cpu - (2 - n_full)) * ring
    for pool in cache.pools.values():
        storage = pool.k.untyped_storage().nbytes() + pool.v.untyped_storage().nbytes()
        assert storage == pool.storage_bytes == pool.n_pages * PAGE * 2 * 2 * 16 * 4
        assert pool.peak_storage_bytes == storage, "the pool grew on the way"


def test_later_calls_find_every_layer_on_its_device() -> None:
    """Decode steps and a turn with padding in the middle; the mask is where the first layer is."""
    devices = ["cpu", "cpu", "meta", "meta", "meta"]
    cache = LightTransferCache(tiny_models.llama(), policy="first", full_layers=3, devices=devices, **SETTINGS)
    prompt(cache, devices)
    mask = torch.arange(47)[None] >= torch.tensor([[0], [17]])
    read(cache, devices, 1, torch.cat([mask, mask[:, -1:]], 1))
    turn = torch.tensor([[True, True, True], [True, False, True]])
    read(cache, devices, 3, torch.cat([mask, mask[:, -1:], turn], 1))
    assert cache.lengths == [51, 33]


def test_scored_layers_may_all_stay_full_where_there_are_few() -> None:
    """Which device has the lazy layers is not known before the prompt is read."""
    config = tiny_models.llama(num_hidden_layers=6)
    cache = LightTransferCache(config, full_layers=3, devices=["cpu", "cpu", *["meta"] * 4], **SETTINGS)
    cache.lengths = [0, 0]
    cache.choice.begin(2)
    step = PromptStep(47, [0, 17], [0, 0], decides=[0, 1])
    whole, ring = sum(map(pages, LENGTHS)), len(LENGTHS) * pages(WINDOW_SIZE)
    for device, expected in (("cpu", 2 * whole), ("meta", 3 * whole + ring)):
        pool = cache.pool_for(torch.empty(2, 2, 47, 16, device=device))
        assert prompt_pages(cache, pool, step) == expected


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="devices must have one entry for each of 5 layers, got 2"):
        LightTransferCache(tiny_models.llama(), devices=["cpu", "meta"], **SETTINGS)


class Hook:
    def __init__(self, execution_device: str) -> None:
        self.execution_device = execution_device


def test_generate_knows_where_layers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build(tiny_models.llama())
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, return_dict_in_generate=True)
    assert out.cache._devices == [torch.device("cpu")] * 5
    for layer in model.model.layers[3:]:
        layer.self_attn.to("meta")
    assert layer_devices(model) == [torch.device(name) for name in ("cpu", "cpu", "cpu", "meta", "meta")]
    model.model.layers[4].self_attn.q_proj._hf_hook = Hook("cuda:1")  # offloaded: weights come when they are used
    assert layer_devices(model)[4] == torch.device("cuda", 1)
