"""The layer heap against sorting, and the rules against loops over float64 numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lighttransfer.selection import (
    FirstLayers,
    LastLayers,
    LayerSelector,
    LayerSignal,
    LazyRatio,
    NonsinkPeak,
    OutputError,
    Policy,
    RandomLayers,
    StaticLayers,
    make_policy,
)
from lighttransfer.settings import Settings
from lighttransfer.window import RetainedWindow

WINDOW = RetainedWindow(2, 6)


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.5, math.inf]), max_size=12), st.integers(0, 12))
def test_the_heap_keeps_what_sorting_keeps(laziness: list[float], n_full: int) -> None:
    selector = LayerSelector(n_full)
    evicted = []
    for layer, value in enumerate(laziness):
        victim = selector.push(layer, value)
        if victim is not None:
            evicted.append(victim)
        assert len(selector.full) == min(layer + 1, n_full)
    # Lazier first; of equally lazy layers the earlier goes first, so the later ones stay.
    order = sorted(range(len(laziness)), key=lambda layer: (laziness[layer], -layer))
    assert selector.full == set(order[:n_full])
    assert sorted(evicted) == sorted(order[n_full:])


def test_equally_lazy_layers_go_in_order() -> None:
    selector = LayerSelector(2)
    assert [selector.push(layer, 1.0) for layer in range(6)] == [None, None, 0, 1, 2, 3]


def random_signal(n_queries: list[int] | None = None) -> LayerSignal:
    generator = torch.Generator().manual_seed(0)
    raw = torch.rand(3, 4, 6, 3, generator=generator)
    raw[1, 2, 3] = torch.tensor([1.0, 1e-4, 1e-4])  # a query that rests on the sinks
    mass = (raw / raw.sum(-1, keepdim=True))[..., :2].contiguous()
    if n_queries is not None:
        for row, n in enumerate(n_queries):
            mass[row, :, : 6 - n] = 0
    counts = None if n_queries is None else torch.tensor(n_queries, dtype=torch.int32)
    return LayerSignal(mass, counts, WINDOW)


@pytest.mark.parametrize("n_queries", [None, [6, 1, 3]])
def test_lazy_ratio(n_queries: list[int] | None) -> None:
    signal = random_signal(n_queries)
    mass = signal.mass.double().numpy()
    expected = [mass[b, :, 6 - n :].sum(-1).mean() for b, n in enumerate(n_queries or [6] * 3)]
    np.testing.assert_allclose(LazyRatio().score(signal).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("n_queries", [None, [6, 1, 3]])
def test_nonsink_peak(n_queries: list[int] | None) -> None:
    signal = random_signal(n_queries)
    mass = signal.mass.double().numpy()
    expected = []
    for b, n in enumerate(n_queries or [6] * 3):
        heads = []
        for h in range(4):
            shares = []
            for i in range(6 - n, 6):
                s, m = mass[b, h, i]
                shares.append(0.0 if 1 - s < 1e-2 else min(max(1 - m / (1 - s), 0.0), 1.0))
            heads.append(np.mean(sorted(shares)[-4:]))
        expected.append(max(heads))
    np.testing.assert_allclose(NonsinkPeak().score(signal).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("n_queries", [None, [6, 1, 3]])
def test_output_error(n_queries: list[int] | None) -> None:
    signal = random_signal(n_queries)
    generator = torch.Generator().manual_seed(1)
    out, kept = torch.randn(2, 3, 5, 4, 8, generator=generator)  # 5 of the 6 queries have outputs
    signal.kept_attention = lambda: (out, kept)
    expected = []
    for b, n in enumerate(n_queries or [6] * 3):
        rows = slice(5 - min(n, 5), 5)
        difference = (out - kept)[b, rows].double().norm(dim=-1) / kept[b, rows].double().norm(dim=-1)
        expected.append(float(difference.mean(0).max()))
    np.testing.assert_allclose(OutputError().score(signal).numpy(), expected, rtol=1e-5)


def test_output_error_needs_outputs() -> None:
    with pytest.raises(ValueError, match="kept_attention"):
        OutputError().score(random_signal())


@pytest.mark.parametrize("policy", [LazyRatio(), NonsinkPeak(), OutputError()])
def test_the_lazier_layer_has_the_larger_laziness(policy: Policy) -> None:
    low, high = policy.laziness(0.1), policy.laziness(0.9)
    assert (low < high) == (policy.keeps == "smallest")
    assert policy.laziness(math.nan) == math.inf
    assert not policy.is_fixed


def test_fixed_policies() -> None:
    layers = [1, 3, 5, 7]
    assert FirstLayers().full_layers(layers, 2) == {1, 3}
    assert LastLayers().full_layers(layers, 3) == {3, 5, 7}
    assert LastLayers().full_layers(layers, 0) == frozenset()
    assert StaticLayers([7, 1, 7]).full_layers(layers, 0) == {1, 7}
    drawn = RandomLayers(3).full_layers(layers, 2)
    assert len(drawn) == 2
    assert drawn <= set(layers)
    assert drawn == RandomLayers(3).full_layers(layers, 2)
    assert len({RandomLayers(seed).full_layers(layers, 2) for seed in range(30)}) == 6
    with pytest.raises(ValueError, match=r"full-attention layers.*got \[2\]"):
        StaticLayers([1, 2]).full_layers(layers, 0)


@pytest.mark.parametrize(
    "policy",
    [
        LazyRatio(),
        NonsinkPeak(2, 0.1),
        OutputError(),
        StaticLayers([4, 2]),
        RandomLayers(7),
        FirstLayers(),
        LastLayers(),
    ],
)
def test_policies_survive_json(policy: Policy) -> None:
    assert make_policy(json.loads(json.dumps(policy.to_dict()))) == policy
    assert make_policy(policy) is policy


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        ("lazyness", ValueError, "policy must be one of .*'lazy_ratio'.*got 'lazyness'"),
        ({"name": "random", "sed": 1}, TypeError, "sed"),
        ("static", TypeError, "layers"),
        ({"name": "nonsink_peak", "floor": 2.0}, ValueError, "floor must lie between 0 and 1, got 2.0"),
        ({"name": "static", "layers": [-1]}, ValueError, "layers must be at least 0, got -1"),
    ],
)
def test_bad_policies(policy: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_policy(policy)


def test_full_layers_is_a_share_or_a_count() -> None:
    assert [Settings(full_layers=share).n_full(30) for share in (0.0, 0.5, 0.75, 1.0)] == [0, 15, 23, 30]
    assert Settings(full_layers=0.5).n_full(7) == 4
    assert Settings(full_layers=3).n_full(7) == 3
    assert Settings(policy=StaticLayers([1, 5])).n_full(7) == 2
    with pytest.raises(ValueError, match="at most the model's 7 full-attention layers, got 8"):
        Settings(full_layers=8).n_full(7)


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("full_layers", 1.5, ValueError),
        ("full_layers", -1, ValueError),
        ("full_layers", True, TypeError),
        ("full_layers", "half", TypeError),
        ("n_sink", -1, ValueError),
        ("n_recent", 0, ValueError),
        ("n_last", 0, ValueError),
        ("page_size", 0, ValueError),
        ("defer_windows", 0.5, ValueError),
        ("policy", "none", ValueError),
    ],
)
def test_bad_settings(setting: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{setting} must"):
        Settings().replace(**{setting: value})


def test_settings_survive_json() -> None:
    settings = Settings(full_layers=3, n_sink=1, n_recent=9, policy=NonsinkPeak(2))
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(TypeError, match="n_sinks must be one of"):
        settings.replace(n_sinks=3)
