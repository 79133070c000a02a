"""What the ops compute, in fp64 and with literal 0/1 masks: slow, and independent of the code under test."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from lighttransfer import _library


@lru_cache(maxsize=64)
def visible(
    n_queries: int, n_keys: int, *, causal: bool = True, n_sink: int = 0, n_recent: int = -1, start: int = 0
) -> Tensor:
    """[S_q, S_k] of bool: may query i see key j? Written out element by element from the definition."""
    mask = torch.zeros(n_queries, n_keys, dtype=torch.bool)
    for i in range(n_queries):
        t = n_keys - n_queries + i - start
        for j in range(max(0, n_keys - start)):
            seen = True
            if causal and j > t:
                seen = False
            if n_recent >= 0 and not (j < n_sink or j > t - n_recent):
                seen = False
            mask[i, start + j] = seen
    return mask


def random_qkv(
    batch: int,
    n_queries: int,
    n_keys: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with unlike strides and storage offsets: q [B, S, H, D] with padding in every dimension, k
    [B, H, S, D] in memory, v the last part of a fused buffer."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch + 1, n_queries + 2, n_heads + 1, head_dim + 8, generator=g).to(dtype).to(device)
    k = torch.randn(batch, n_kv_heads + 2, n_keys + 1, head_dim, generator=g).to(dtype).to(device)
    v = torch.randn(batch, n_keys, 3 * n_kv_heads, head_dim, generator=g).to(dtype).to(device)
    return (
        q[1:, 1 : 1 + n_queries, :n_heads, :head_dim],
        k[:, 1 : 1 + n_kv_heads, 1:].transpose(1, 2),
        v[:, :, 2 * n_kv_heads :],
    )


def _scores(q: Tensor, k: Tensor, scale: float | None, dtype: torch.dtype) -> Tensor:
    """[B, H_q, S_q, S_k], computed in dtype."""
    keys = k.to(dtype).repeat_interleave(q.shape[2] // max(1, k.shape[2]), dim=2)
    return torch.einsum("bqhd,bkhd->bhqk", q.to(dtype), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _masks(q: Tensor, k: Tensor, seq_start: Tensor | None, causal: bool, n_sink: int, n_recent: int) -> Tensor:
    """[B, 1, S_q, S_k]"""
    starts = [0] * q.shape[0] if seq_start is None else seq_start.tolist()
    masks = [visible(q.shape[1], k.shape[1], causal=causal, n_sink=n_sink, n_recent=n_recent, start=s) for s in starts]
    if not masks:
        return torch.zeros(0, 1, q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    return torch.stack(masks)[:, None].to(q.device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    n_sink: int = 0,
    n_recent: int = -1,
    seq_start: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """prefill_attn: out [B, S_q, H_q, D] and lse [B, H_q, S_q].

    In fp64: the truth. In another dtype: plain torch in that precision (softmax and lse in at least fp32), whose
    error against the truth is the measure for a kernel's.
    """
    mask = _masks(q, k, seq_start, causal, n_sink, n_recent)
    scores = _scores(q, k, scale, dtype).to(torch.promote_types(dtype, torch.float32)).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1) if k.shape[1] > 0 else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = torch.where(mask, (scores - lse[..., None]).exp(), 0.0).to(dtype)
    values = v.to(dtype).repeat_interleave(q.shape[2] // max(1, v.shape[2]), dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values), lse


def kept_mass(
    q: Tensor,
    k: Tensor,
    *,
    n_sink: int,
    n_recent: int,
    n_last: int,
    scale: float | None = None,
    seq_start: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """[B, H_q, n_last, 2]: the probabilities of all queries of a full causal pass, summed over the sinks and over the
    other keys that a cut at the prompt's end keeps. Zeros where there is no real query."""
    mask = _masks(q, k, seq_start, True, 0, -1)
    scores = _scores(q, k, scale, dtype).to(torch.promote_types(dtype, torch.float32)).masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # [B, H_q, S_q, S_k]
    mass = weights.new_zeros(q.shape[0], q.shape[2], n_last, 2)
    starts = [0] * q.shape[0] if seq_start is None else seq_start.tolist()
    for b, start in enumerate(starts):
        length = k.shape[1] - start
        sinks = [start + j for j in range(length) if j < n_sink]
        others = [start + j for j in range(length) if j >= n_sink and j >= length - n_recent]
        n = min(n_last, q.shape[1], length)
        for part, keys in enumerate((sinks, others)):
            mass[b, :, n_last - n :, part] = weights[b, :, q.shape[1] - n :, keys].sum(-1)
    return mass


def assert_matches(got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, **kwargs) -> None:
    """out and lse against fp64: lse first, the places of -inf before the values; then out, whose error may be twice
    that of plain torch in the same precision (and an output's own rounding, which no kernel can avoid)."""
    out, lse = got
    want, want_lse = attention(q, k, v, **kwargs)
    assert lse.dtype == torch.float32
    assert lse.shape == want_lse.shape
    assert lse.is_contiguous()
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    seen = want_lse != -torch.inf
    plain_lse = attention(q, k, v, **kwargs, dtype=torch.float32)[1]
    assert _largest(lse[seen] - want_lse[seen]) <= max(lse_floor(q), 2 * _largest(plain_lse[seen] - want_lse[seen]))

    assert out.dtype == q.dtype
    assert out.shape == want.shape
    assert out.is_contiguous()
    assert not out.isnan().any()
    assert (out.transpose(1, 2)[~seen] == 0).all()
    plain = attention(q, k, v, **kwargs, dtype=q.dtype)[0]
    rounding = torch.finfo(q.dtype).eps / 2 * _largest(want)
    assert _largest(out - want) <= 2 * max(_largest(plain - want), rounding)


def lse_floor(q: Tensor) -> float:
    """The error that an lse or a mass may have beyond plain fp32's: what ex2.approx and tensor cores leave of fp32.

    On a CPU with AMX prefill_attn runs torch's flash attention in 16 bits, whose exp has a relative error of 6e-5: less
    than the rounding of its outputs, more than fp32's.
    """
    on_cpu = q.device.type == "cpu" and _library.namespace == "lighttransfer"
    return 1e-4 if on_cpu and q.dtype != torch.float32 and _has_amx() else 2e-6


@cache
def _has_amx() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() > 0 else 0.0
