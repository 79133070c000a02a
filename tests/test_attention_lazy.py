"""prefill_attn_lazy: the full pass bit for bit, and the mass of its last queries against fp64."""

from __future__ import annotations

import pytest
import torch
from reference import assert_matches, kept_mass, lse_floor, random_qkv

from lighttransfer import _library
from lighttransfer.ops import lazy_ratio, prefill_attn, prefill_attn_lazy, retained_mass

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _assert_mass_matches(mass, q, k, **kwargs):
    """A probability is exp(score - lse): at most twice plain fp32's error for exact products of the inputs."""
    want = kept_mass(q, k, **kwargs)
    assert mass.dtype == torch.float32
    assert mass.shape == want.shape
    assert mass.is_contiguous()
    assert not mass.isnan().any()
    assert torch.equal(mass == 0, want == 0)
    plain = kept_mass(q, k, **kwargs, dtype=torch.float32)
    if mass.numel() > 0:
        assert (mass - want).abs().max() <= max(lse_floor(q), 2 * (plain - want).abs().max().item())


def _check(q, k, v, **kwargs):
    out, lse, mass = prefill_attn_lazy(q, k, v, **kwargs)
    full = {name: kwargs[name] for name in ("scale", "seq_start") if name in kwargs}
    if q.device.type == "cpu" and _library.namespace == "lighttransfer":
        want_out, want_lse = prefill_attn(q, k, v, **full)
        assert torch.equal(lse, want_lse)
        assert torch.equal(out, want_out)
    else:  # a GPU's row tiles that measure mass may round elsewhere
        assert_matches((out, lse), q, k, v, **full)
    _assert_mass_matches(mass, q, k, **kwargs)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 256])
def test_mass_equals_fp64(device, head_dim, dtype):
    q, k, v = random_qkv(3, 130, 130, 4, 2, head_dim, dtype, device)
    _check(q, k, v, n_sink=4, n_recent=20, n_last=32)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1)])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(129, 129), (65, 200), (20, 129), (1, 65), (150, 129)])
def test_lengths_and_groups(device, n_queries, n_keys, n_heads, n_kv_heads):
    q, k, v = random_qkv(2, n_queries, n_keys, n_heads, n_kv_heads, 64, BF16, device)
    _check(q, k, v, n_sink=4, n_recent=40, n_last=32)


@pytest.mark.parametrize("n_last", [0, 1, 32, 130, 200])
@pytest.mark.parametrize(("n_sink", "n_recent"), [(0, 0), (4, 0), (0, 7), (4, 20), (70, 60), (4, 129), (500, 500)])
def test_windows(device, n_sink, n_recent, n_last):
    q, k, v = random_qkv(1, 130, 130, 2, 1, 64, BF16, device)
    _check(q, k, v, n_sink=n_sink, n_recent=n_recent, n_last=n_last)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(100, 100), (40, 100)])
def test_left_padding(device, n_queries, n_keys):
    q, k, v = random_qkv(4, n_queries, n_keys, 4, 2, 64, BF16, device)
    starts = torch.tensor([0, 37, n_keys - 5, n_keys], dtype=torch.int32, device=device)
    _check(q, k, v, n_sink=4, n_recent=20, n_last=32, seq_start=starts, scale=0.2)


def test_equals_retained_mass(device):
    q, k, v = random_qkv(3, 100, 100, 4, 2, 64, BF16, device)
    starts = torch.tensor([0, 30, 60], dtype=torch.int32, device=device)
    window = {"n_sink": 4, "n_recent": 20, "seq_start": starts}
    _, lse, mass = prefill_attn_lazy(q, k, v, n_last=32, **window)
    want = retained_mass(q[:, -32:], k, lse[:, :, -32:].contiguous(), **window)
    torch.testing.assert_close(mass, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("n_keys", [20, 64])
def test_a_prompt_inside_the_window_is_all_kept(device, n_keys):
    q, k, v = random_qkv(3, n_keys, n_keys, 4, 2, 64, BF16, device)
    mass = prefill_attn_lazy(q, k, v, n_sink=4, n_recent=60, n_last=20)[2]
    torch.testing.assert_close(mass.sum(-1), torch.ones(3, 4, 20, device=device), rtol=0, atol=1e-6)
    torch.testing.assert_close(lazy_ratio(mass), torch.ones(3, device=device), rtol=0, atol=1e-6)


def test_mass_is_a_probability(device):
    q, k, v = random_qkv(3, 65, 65, 4, 2, 64, BF16, device)
    k[:, 4].fill_(-2)  # the only key that the window drops has next to no mass
    q.abs_()
    mass = prefill_attn_lazy(q, k, v, n_sink=4, n_recent=60, n_last=20)[2]
    assert (mass >= 0).all()
    assert (mass.sum(-1) <= 1 + 1e-6).all()


@pytest.mark.parametrize("shape", [(0, 5, 5, 4, 2), (2, 0, 5, 4, 2), (2, 5, 0, 4, 2), (2, 5, 5, 0, 0)])
def test_empty_dimensions(device, shape):
    batch, n_queries, n_keys, n_heads, n_kv_heads = shape
    q = torch.randn(batch, n_queries, n_heads, 64, device=device).to(BF16)
    k = torch.randn(batch, n_keys, n_kv_heads, 64, device=device).to(BF16)
    out, lse, mass = prefill_attn_lazy(q, k, k, n_sink=1, n_recent=2, n_last=3)
    assert out.shape == q.shape
    assert (lse == -torch.inf).all()
    assert mass.shape == (batch, n_heads, 3, 2)
    assert (mass == 0).all()


def test_errors_name_argument_rule_and_value(device):
    q, k, v = random_qkv(2, 7, 9, 4, 2, 64, BF16, device)
    window = {"n_sink": 1, "n_recent": 2, "n_last": 3}
    with pytest.raises(ValueError, match=r"prefill_attn_lazy: n_recent must lie in \[0, .*, got -1"):
        prefill_attn_lazy(q, k, v, **{**window, "n_recent": -1})
    with pytest.raises(ValueError, match=r"n_sink must lie in \[0, .*, got -1"):
        prefill_attn_lazy(q, k, v, **{**window, "n_sink": -1})
    with pytest.raises(ValueError, match=r"n_last must lie in \[0, .*, got -1"):
        prefill_attn_lazy(q, k, v, **{**window, "n_last": -1})
    with pytest.raises(ValueError, match=r"k must have shape .*, got \[1, 9, 2, 64\]"):
        prefill_attn_lazy(q, k[:1], v, **window)
    with pytest.raises(ValueError, match="scale must be a positive finite number, got"):
        prefill_attn_lazy(q, k, v, scale=-1.0, **window)


def test_opcheck(device):
    q, k, v = random_qkv(2, 7, 9, 4, 2, 64, BF16, device)
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    arguments = {"n_sink": 2, "n_recent": 3, "n_last": 5, "seq_start": starts}
    torch.library.opcheck(torch.ops.lighttransfer.prefill_attn_lazy.default, (q, k, v), arguments)


def test_compiles_without_graph_break(device):
    q, k, v = random_qkv(2, 65, 70, 4, 2, 64, BF16, device)
    window = {"n_sink": 2, "n_recent": 30, "n_last": 8}
    compiled = torch.compile(lambda *qkv: prefill_attn_lazy(*qkv, **window), backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(q, k, v), prefill_attn_lazy(q, k, v, **window), strict=True):
        assert torch.equal(a, b)
