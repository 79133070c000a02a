"""The reference model itself: against transformers, hand-made masks and a decode loop over a list."""

from __future__ import annotations

import math

import pytest
import reference_model as ref
import tiny_models
import torch


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_uncut_reference_is_transformers_own_model(name: str) -> None:
    model = tiny_models.build(tiny_models.ARCHITECTURES[name]())
    ids = tiny_models.prompt(40, seed=3)
    exact = ref.ReferenceModel(model).run(ids)
    plain = ref.ReferenceModel(model, torch.float32).run(ids)
    for attention in ("eager", "sdpa") if name not in ("gpt_oss", "gemma2") else ("eager",):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].double()
        assert (logits - exact.logits).abs().max() < 5e-5
        ref.assert_as_close_as_plain_torch(logits, exact.logits, plain.logits, what=attention, factor=3.0)


def test_visible_keys_of_a_cut_layer_by_hand() -> None:
    visible = ref.visible_keys(range(7), cut_at=4, n_sink=1, n_recent=2)
    rows = ["1000000", "1100000", "1110000", "1111000", "1001100", "1000110", "1000011"]
    assert ["".join("01"[int(x)] for x in row) for row in visible] == rows


def test_visible_keys_of_a_native_window_by_hand() -> None:
    visible = ref.visible_keys(range(5), native_window=2)
    rows = ["10000", "11000", "01100", "00110", "00011"]
    assert ["".join("01"[int(x)] for x in row) for row in visible] == rows


def test_one_masked_pass_equals_a_decode_loop_over_a_list_of_keys() -> None:
    """A head of attention over a growing Python list of (position, k, v), evicted by hand."""
    n_sink, n_recent, cut_at, length = 2, 3, 9, 20
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, length, 8, generator=generator, dtype=torch.float64)
    cache: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    out = []
    for t in range(length):
        cache.append((t, k[t], v[t]))
        if t >= cut_at:
            cache = [entry for entry in cache if entry[0] < n_sink or entry[0] > t - n_recent]
            assert len(cache) == n_sink + n_recent
        weights = torch.softmax(torch.stack([q[t] @ key for _, key, _ in cache]), 0)
        out.append(sum(w * value for w, (_, _, value) in zip(weights, cache, strict=True)))
    visible = ref.visible_keys(range(length), cut_at=cut_at, n_sink=n_sink, n_recent=n_recent)
    dense = torch.softmax((q @ k.mT).masked_fill(~visible, -math.inf), -1) @ v
    assert torch.allclose(torch.stack(out), dense, rtol=0, atol=1e-12)


def test_a_cut_moves_the_logits_of_decode_steps_only() -> None:
    model = ref.ReferenceModel(tiny_models.build(tiny_models.llama()))
    ids = tiny_models.prompt(40, seed=5)
    full = model.run(ids).logits
    cut = model.run(ids, cut_at={1: 25, 3: 25}, n_sink=2, n_recent=6).logits
    assert torch.equal(full[:25], cut[:25])
    assert ((full[25:] - cut[25:]).abs().amax(-1) > 1e-2).all()


def test_generate_of_the_uncut_reference_is_transformers() -> None:
    model = tiny_models.build(tiny_models.llama())
    ids = torch.tensor([tiny_models.prompt(20, seed=seed) for seed in range(2)])
    kwargs = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    expected = model.generate(ids, **kwargs)
    actual = ref.ReferenceModel(model).generate(ids, cut_at=[{}, {}], n_sink=0, n_recent=0, **kwargs)
    assert torch.equal(actual, expected)


def _layer(probabilities: list[list[float]], values: torch.Tensor | None = None) -> ref.LayerTrace:
    p = torch.tensor([probabilities], dtype=torch.float64)
    return ref.LayerTrace(p, torch.zeros(1, p.shape[-1], 1) if values is None else values[None], None)


def test_kept_keys_by_hand() -> None:
    anchored = ref.kept_keys(6, n_sink=1, n_recent=2, n_last=3)
    rolling = ref.kept_keys(6, n_sink=1, n_recent=2, n_last=3, rolling=True)
    assert ["".join("01"[int(x)] for x in row) for row in anchored] == ["100011"] * 3
    assert ["".join("01"[int(x)] for x in row) for row in rolling] == ["101111", "100111", "100011"]  # causal cut apart


def test_selection_rules_by_hand() -> None:
    # One head, four keys, one sink and one recent key kept; the last query alone counts.
    layer = _layer([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.4, 0.3, 0.3, 0], [0.5, 0.1, 0.2, 0.2]])
    kept = ref.kept_keys(4, n_sink=1, n_recent=1, n_last=1)
    assert ref.lazy_ratio(layer, kept, 1) == pytest.approx(0.7)
    assert ref.nonsink_peak(layer, kept, 1) == pytest.approx(1 - 0.2 / 0.5)
    layer.values = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]], dtype=torch.float64)
    full, cut = 0.5 + 0.2 + 0.6 + 0.8, (0.5 + 0.8) / 0.7
    assert ref.output_error(layer, kept, 1) == pytest.approx(abs(full - cut) / cut)


def test_selection_rules_of_a_prompt_inside_the_window() -> None:
    layer = _layer([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]])
    kept = ref.kept_keys(3, n_sink=1, n_recent=2, n_last=2)
    assert ref.lazy_ratio(layer, kept, 1) == pytest.approx(1.0)
    assert ref.nonsink_peak(layer, kept, 1) == pytest.approx(0.0)


def test_choice_breaks_ties_by_evicting_the_earlier_layer() -> None:
    same = _layer([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]])
    trace = ref.Trace(torch.zeros(3, 1), {i: same for i in range(4)})
    choice = ref.choose(trace, 3, rule="lazy_ratio", n_full=2, n_sink=1, n_recent=1, n_last=1)
    assert choice.full == {2, 3}
    assert choice.gap == 0
