"""prefill_attn against fp64 attention with literal masks."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from reference import assert_matches, random_qkv

from lighttransfer.ops import prefill_attn

LENGTHS = [1, 7, 64, 65, 127, 128, 129, 333, 512]
PAIRS = [(n, n) for n in LENGTHS] + [
    (1, 333),
    (7, 64),
    (64, 65),
    (65, 512),
    (127, 129),
    (128, 333),
    (64, 1),
    (129, 128),
    (333, 127),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _starts(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_queries", "n_keys"), PAIRS)
def test_lengths(device, n_queries, n_keys, causal):
    q, k, v = random_qkv(2, n_queries, n_keys, 2, 1, 64, BF16, device)
    assert_matches(prefill_attn(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("n_queries", "n_keys"), list(itertools.product(LENGTHS, LENGTHS)))
def test_all_lengths(device, n_queries, n_keys, head_dim):
    q, k, v = random_qkv(3, n_queries, n_keys, 4, 2, head_dim, FP16, device)
    assert_matches(prefill_attn(q, k, v), q, k, v)
    windows = {"n_sink": 4, "n_recent": 60, "seq_start": _starts(0, n_keys // 2, n_keys, device=device)}
    assert_matches(prefill_attn(q, k, v, **windows), q, k, v, **windows)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 256])
def test_head_dims(device, head_dim, dtype):
    q, k, v = random_qkv(3, 65, 129, 2, 1, head_dim, dtype, device)
    assert_matches(prefill_attn(q, k, v), q, k, v)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(2, 2), (3, 1), (6, 2), (4, 1), (8, 2), (8, 1), (16, 2)])
def test_grouped_heads(device, n_heads, n_kv_heads):
    q, k, v = random_qkv(3, 65, 129, n_heads, n_kv_heads, 64, BF16, device)
    assert_matches(prefill_attn(q, k, v), q, k, v)
    windows = {"n_sink": 4, "n_recent": 20}
    assert_matches(prefill_attn(q, k, v, **windows), q, k, v, **windows)


def _layouts(device):
    """q, k and v of [3, 70, ., 64] in the layouts that models produce."""
    contiguous = [t.contiguous() for t in random_qkv(3, 70, 70, 4, 2, 64, FP16, device)]
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in contiguous]
    fused = torch.cat(contiguous, dim=2)
    expanded = [t[:1].expand(3, -1, -1, -1) for t in contiguous]
    odd = [torch.nn.functional.pad(t, (1, 0)) for t in contiguous]  # rows start off any alignment
    shared = contiguous[0], contiguous[1][:, :, :1].expand(-1, -1, 2, -1), contiguous[2]
    return {
        "contiguous": contiguous,
        "heads first": heads_first,
        "fused": [fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]],
        "batch expanded": expanded,
        "KV heads expanded": shared,
        "tokens first": [t.transpose(0, 1).contiguous().transpose(0, 1) for t in contiguous],
        "odd strides": [t[..., 1:] for t in odd],
        "every other token": [t.repeat_interleave(2, dim=1)[:, ::2] for t in contiguous],
    }


@pytest.mark.parametrize("window", [{}, {"n_sink": 4, "n_recent": 9}, {"n_recent": 9}], ids=str)
@pytest.mark.parametrize("layout", list(_layouts("cpu")))
def test_layouts(device, layout, window):
    q, k, v = _layouts(device)[layout]
    before = [t.clone() for t in (q, k, v)]
    assert_matches(prefill_attn(q, k, v, **window), q, k, v, **window)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


WINDOWS = [(0, 0), (0, 1), (4, 0), (1, 1), (4, 60), (0, 64), (65, 3), (4, 124), (129, 129), (2000, 0), (0, 2000)]


@pytest.mark.parametrize(("n_sink", "n_recent"), WINDOWS)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(7, 7), (129, 129), (333, 333), (65, 333), (1, 129), (200, 129)])
def test_streaming_mask(device, n_queries, n_keys, n_sink, n_recent):
    q, k, v = random_qkv(1, n_queries, n_keys, 2, 1, 64, BF16, device)
    window = {"n_sink": n_sink, "n_recent": n_recent}
    assert_matches(prefill_attn(q, k, v, **window), q, k, v, **window)


def test_wide_streaming_mask(device):
    q, k, v = random_qkv(1, 900, 900, 2, 1, 64, BF16, device)
    window = {"n_sink": 4, "n_recent": 520}
    assert_matches(prefill_attn(q, k, v, **window), q, k, v, **window)


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_streaming_mask_dtypes(device, dtype):
    q, k, v = random_qkv(3, 200, 200, 4, 2, 72, dtype, device)
    window = {"n_sink": 4, "n_recent": 60}
    assert_matches(prefill_attn(q, k, v, **window), q, k, v, **window)


@pytest.mark.parametrize("window", [{}, {"n_sink": 4, "n_recent": 20}, {"n_sink": 0, "n_recent": 64}], ids=str)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(129, 129), (65, 129), (1, 65), (150, 129)])
def test_left_padding(device, n_queries, n_keys, window):
    q, k, v = random_qkv(5, n_queries, n_keys, 4, 2, 64, BF16, device)
    starts = _starts(0, 3, 3, n_keys - 1, n_keys, device=device)
    kwargs = {**window, "seq_start": starts}
    assert_matches(prefill_attn(q, k, v, **kwargs), q, k, v, **kwargs)


def test_left_padding_is_the_row_alone(device):
    q, k, v = random_qkv(3, 100, 100, 4, 2, 64, BF16, device)
    window = {"n_sink": 4, "n_recent": 20}
    out, lse = prefill_attn(q, k, v, seq_start=_starts(0, 37, 90, device=device), **window)
    for b, start in enumerate([0, 37, 90]):
        alone, alone_lse = prefill_attn(*(t[b : b + 1, start:] for t in (q, k, v)), **window)
        torch.testing.assert_close(lse[b : b + 1, :, start:], alone_lse, rtol=1e-6, atol=2e-6)
        # Tiles lie elsewhere in the padded row, so their roundings differ.
        rounding = torch.finfo(BF16).eps * alone.abs().max().item()
        torch.testing.assert_close(out[b : b + 1, start:], alone, rtol=0, atol=rounding)


def test_without_causal_padding_hides_keys_only(device):
    q, k, v = random_qkv(3, 20, 33, 4, 2, 64, BF16, device)
    kwargs = {"causal": False, "seq_start": _starts(0, 30, 33, device=device)}
    assert_matches(prefill_attn(q, k, v, **kwargs), q, k, v, **kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"n_sink": 3, "n_recent": 17}], ids=str)
def test_hidden_keys_have_no_influence(device, kwargs):
    q, k, v = (t.contiguous() for t in random_qkv(2, 100, 100, 2, 2, 64, BF16, device))
    kwargs = {**kwargs, "seq_start": _starts(40, 40, device=device)}
    want = prefill_attn(q, k, v, **kwargs)
    k[:, :40] = 3e4
    v[:, :40] = -3e4
    got = prefill_attn(q, k, v, **kwargs)
    k[:, 80:] = 3e4  # later keys, for the queries before them
    v[:, 80:] = -3e4
    later = prefill_attn(q, k, v, **kwargs)
    for a, b, c in zip(want, got, later, strict=True):
        assert torch.equal(a, b)
        tokens = 1 if a.dim() == 4 else 2
        assert torch.equal(a.narrow(tokens, 0, 80), c.narrow(tokens, 0, 80))


def test_scale(device):
    q, k, v = random_qkv(2, 65, 129, 4, 2, 64, BF16, device)
    assert_matches(prefill_attn(q, k, v, scale=0.3), q, k, v, scale=0.3)


def test_large_scores_stay_finite(device):
    q, k, v = random_qkv(2, 130, 130, 2, 1, 64, BF16, device)
    for window in ({}, {"n_sink": 4, "n_recent": 20}):
        out, lse = prefill_attn(100 * q, 100 * k, v, **window)
        assert out.isfinite().all()
        assert lse.isfinite().all()
        assert (out.abs().amax() <= v.abs().amax()).all()


def test_a_window_beyond_all_keys_is_none(device):
    q, k, v = random_qkv(2, 65, 65, 2, 1, 64, BF16, device)
    want = prefill_attn(q, k, v)
    largest = 2**63 - 1
    for window in ({"n_recent": largest}, {"n_sink": largest, "n_recent": largest}, {"n_sink": 65, "n_recent": 0}):
        got = prefill_attn(q, k, v, **window)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape", [(0, 5, 5, 4, 2), (2, 0, 5, 4, 2), (2, 5, 0, 4, 2), (2, 0, 0, 4, 2), (2, 5, 5, 0, 1), (2, 5, 5, 0, 0)]
)
def test_empty_dimensions(device, shape, causal):
    batch, n_queries, n_keys, n_heads, n_kv_heads = shape
    q = torch.randn(batch, n_queries, n_heads, 64, device=device).to(BF16)
    k = torch.randn(batch, n_keys, n_kv_heads, 64, device=device).to(BF16)
    out, lse = prefill_attn(q, k, k, causal=causal, seq_start=torch.zeros(batch, dtype=torch.int32, device=device))
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == (batch, n_heads, n_queries)
    assert (lse == -torch.inf).all()


def test_errors_name_argument_rule_and_value(device):
    q, k, v = random_qkv(2, 7, 9, 4, 2, 64, BF16, device)
    starts = _starts(0, 0, device=device)
    with pytest.raises(ValueError, match=r"q must have shape \[B, S_q, H_q, D\] = .*, got \[7, 4, 64\]"):
        prefill_attn(q[0], k, v)
    with pytest.raises(ValueError, match=r"k must have shape .* = \[2, \*, \*, 64\], got \[1, 9, 2, 64\]"):
        prefill_attn(q, k[:1], v)
    with pytest.raises(ValueError, match=r"v must have shape .* = \[2, 9, 2, 64\], got \[2, 8, 2, 64\]"):
        prefill_attn(q, k, v[:, :8])
    with pytest.raises(TypeError, match="v must have dtype BFloat16, got Half"):
        prefill_attn(q, k, v.half())
    with pytest.raises(TypeError, match=r"q must have dtype .*, got Double"):
        prefill_attn(q.double(), k, v)
    with pytest.raises(ValueError, match=r"q must have a number of heads .*, got 3 heads over 2 KV heads"):
        prefill_attn(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match=r"head_dim that is a multiple of 8 in .*, got 60"):
        prefill_attn(q[..., :60], k[..., :60], v[..., :60])
    with pytest.raises(ValueError, match="k must have unit stride in its last dimension, got strides"):
        prefill_attn(q[..., :32], k[..., ::2], v[..., :32])
    with pytest.raises(ValueError, match=r"n_sink must lie in \[0, .*, got -1"):
        prefill_attn(q, k, v, n_sink=-1)
    with pytest.raises(ValueError, match=r"n_recent must lie in \[-1, .*, got -2"):
        prefill_attn(q, k, v, n_recent=-2)
    with pytest.raises(ValueError, match="n_recent must be -1 where causal is False, got 5"):
        prefill_attn(q, k, v, causal=False, n_recent=5)
    for scale in (0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300):  # the last two in fp32
        with pytest.raises(ValueError, match=f"scale must be a positive finite number, got {re.escape(f'{scale:g}')}"):
            prefill_attn(q, k, v, scale=scale)
    with pytest.raises(ValueError, match=r"seq_start must have shape .*\[2\], got \[1\]"):
        prefill_attn(q, k, v, seq_start=starts[:1])
    with pytest.raises(TypeError, match="seq_start must have dtype Int, got Long"):
        prefill_attn(q, k, v, seq_start=starts.long())
    with pytest.raises(TypeError, match="k must be a tensor, got None"):
        prefill_attn(q, None, v)


@pytest.mark.parametrize("value", [-1, 10, -(2**31), 2**31 - 1])
def test_seq_start_outside_the_keys(device, value):
    q, k, v = random_qkv(2, 7, 9, 4, 2, 64, BF16, device)
    starts = _starts(0, value, device=device)
    if device == "cuda":  # reading it would wait for the device: the kernels clamp it
        prefill_attn(q, k, v, seq_start=starts)
    else:
        with pytest.raises(ValueError, match=rf"seq_start must lie in \[0, 9\] in every row, got {value} in row 1"):
            prefill_attn(q, k, v, seq_start=starts)


def test_opcheck(device):
    q, k, v = random_qkv(2, 7, 9, 4, 2, 64, BF16, device)
    op = torch.ops.lighttransfer.prefill_attn.default
    torch.library.opcheck(op, (q, k, v), {"n_sink": 2, "n_recent": 3, "seq_start": _starts(0, 2, device=device)})
    torch.library.opcheck(op, (q, k, v), {"causal": False, "scale": 0.2})


def test_compiles_without_graph_break(device):
    q, k, v = random_qkv(2, 65, 70, 4, 2, 64, BF16, device)
    window = {"n_sink": 2, "n_recent": 30}
    compiled = torch.compile(lambda *qkv: prefill_attn(*qkv, **window), backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(q, k, v), prefill_attn(q, k, v, **window), strict=True):
        assert torch.equal(a, b)
