"""merge_states against fp64, and the algebra it must obey."""

from __future__ import annotations

import pytest
import torch

from lighttransfer.ops import merge_states


def _state(batch, tokens, heads, dim, dtype, device, seed, empty_rows=True):
    g = torch.Generator().manual_seed(seed)
    # Padded in every dimension, so that no stride is the contiguous one.
    out = torch.randn(batch + 1, tokens + 2, heads + 1, dim + 8, generator=g).to(dtype)[1:, 1:-1, :heads, :dim]
    lse = torch.randn(batch, heads, tokens + 3, generator=g)[:, :, :tokens] * 5
    if empty_rows:
        lse = lse.masked_fill(torch.rand(lse.shape, generator=g) < 0.2, -torch.inf)
        out = out.masked_fill((lse == -torch.inf).transpose(1, 2)[..., None], 0)
    return out.to(device), lse.to(device)


def _merge_fp64(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    weights = [(s.double() - lse).exp().nan_to_num(0.0).transpose(1, 2)[..., None] for s in (lse_a, lse_b)]
    return weights[0] * out_a.double() + weights[1] * out_b.double(), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])  # 1: rows start off any alignment
@pytest.mark.parametrize("shape", [(3, 5, 4, 64), (3, 1, 3, 72), (4, 7, 1, 256), (3, 5, 4, 12), (3, 2, 3, 1)])
def test_equals_fp64(device, dtype, shape, offset):
    *outer, dim = shape
    (a, la), (b, lb) = (_state(*outer, dim + offset, dtype, device, seed) for seed in (0, 1))
    a, b = a[..., offset:], b[..., offset:]
    out, lse = merge_states(a, la, b, lb)
    want, want_lse = _merge_fp64(a, la, b, lb)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    finite = want_lse != -torch.inf
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], atol=2e-6, rtol=1e-6)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert not out.isnan().any()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, atol=eps, rtol=eps)


@pytest.mark.parametrize("offset", [0, 1])
def test_identity_is_bitwise(device, offset):
    a, la = _state(3, 5, 4, 64 + offset, torch.bfloat16, device, 2, empty_rows=False)
    a = a[..., offset:]
    a[0, 0, 0, 0] = -0.0
    empty = torch.zeros_like(a), torch.full_like(la, -torch.inf)
    for out, lse in (merge_states(a, la, *empty), merge_states(*empty, a, la)):
        assert torch.equal(out.contiguous().view(torch.int16), a.contiguous().view(torch.int16))
        assert torch.equal(lse, la)


def test_two_empty_states_are_empty(device):
    a = torch.zeros(1, 2, 3, 8, dtype=torch.float16, device=device)
    lse = torch.full((1, 3, 2), -torch.inf, device=device)
    out, merged = merge_states(a, lse, a, lse)
    assert (out == 0).all()
    assert (merged == -torch.inf).all()


@pytest.mark.parametrize("shape", [(0, 5, 4, 64), (3, 0, 4, 64), (3, 5, 0, 64)])
def test_empty_dimensions(device, shape):
    a, la = _state(*shape, torch.float16, device, 0)
    out, lse = merge_states(a, la, a, la)
    assert out.shape == shape
    assert lse.shape == la.shape


def test_errors_name_argument_rule_and_value(device):
    a, la = _state(2, 3, 4, 64, torch.float16, device, 0)
    with pytest.raises(ValueError, match=r"out_b must have shape .*\[2, 3, 4, 64\], got \[1, 3, 4, 64\]"):
        merge_states(a, la, a[:1], la)
    with pytest.raises(TypeError, match="out_b must have dtype Half, got BFloat16"):
        merge_states(a, la, a.bfloat16(), la)
    with pytest.raises(TypeError, match="lse_b must have dtype Float, got Double"):
        merge_states(a, la, a, la.double())
    with pytest.raises(TypeError, match="out_b"):
        merge_states(a, la, None, la)


def test_opcheck(device):
    a, la = _state(2, 3, 4, 64, torch.float16, device, 0)
    torch.library.opcheck(torch.ops.lighttransfer.merge_states.default, (a, la, a, la))
