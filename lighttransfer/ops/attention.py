"""Attention over a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import call


def prefill_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    n_sink: int = 0,
    n_recent: int = -1,
    seq_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a chunk of queries over all keys up to them, or over sinks and recent keys only.

    The last query stands at the last key: query ``i`` is at position ``S_k - S_q + i - seq_start[b]``, key ``j`` at
    ``j - seq_start[b]``. With ``causal`` the query at ``t`` sees the keys ``0 <= j <= t``; with ``n_recent >= 0`` only
    those of them with ``j < n_sink`` or ``j > t - n_recent`` (the streaming mask, the view that a layer has which
    keeps a ring: LightTransfer, arXiv:2410.13846, section 4), at a cost of ``O(S_q * (n_sink + n_recent))``. Without
    ``causal`` every query sees every key from ``seq_start[b]`` on, whatever its position.

    Args:
        q: ``[B, S_q, H_q, D]``, fp16, bf16 or (CPU) fp32.
        k, v: ``[B, S_k, H_kv, D]`` in q's dtype; ``S_k`` may be smaller or larger than ``S_q``.
        scale: of the scores before the softmax, positive; None: ``1 / sqrt(D)``.
        causal: no query sees a later key.
        n_sink: how many of a row's first keys every query sees; without effect where ``n_recent`` is -1.
        n_recent: how many keys up to and including its own a query sees; 0: only sinks, -1: no window. A window needs
            ``causal``.
        seq_start: int32 ``[B]`` in ``[0, S_k]``, the first real token of a left-padded row; keys before it are
            invisible and positions count from it. None: 0 in every row.

    Returns:
        ``out [B, S_q, H_q, D]`` in q's dtype and ``lse [B, H_q, S_q]`` in fp32, the natural logarithm of the summed
        exponentials of the scaled scores. A query that sees no key has ``out = 0`` and ``lse = -inf``.

    Raises:
        ValueError: shapes, devices, strides or numbers that do not fit.
        TypeError: dtypes that do not fit.

    Example:
        >>> import torch
        >>> from lighttransfer.ops import prefill_attn
        >>> q, k = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 2, 8)
        >>> v = torch.arange(3.0).view(1, 3, 1, 1).repeat(1, 1, 2, 8)
        >>> out, lse = prefill_attn(q, k, v)
        >>> out[0, :, 0, 0].tolist()
        [0.0, 0.5, 1.0]
        >>> prefill_attn(q, k, v, n_recent=2)[0][0, :, 0, 0].tolist()
        [0.0, 0.5, 1.5]
    """
    result: tuple[Tensor, Tensor] = call(
        "prefill_attn",
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        n_sink=n_sink,
        n_recent=n_recent,
        seq_start=seq_start,
    )
    return result


@torch.library.register_fake("lighttransfer::prefill_attn")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    n_sink: int = 0,
    n_recent: int = -1,
    seq_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, n_queries, n_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, n_heads, n_queries), dtype=torch.float32)


def prefill_attn_lazy(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    n_sink: int,
    n_recent: int,
    n_last: int,
    scale: float | None = None,
    seq_start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Full causal attention that also measures how lazy it is (LightTransfer, arXiv:2410.13846, section 4).

    ``out`` and ``lse`` are those of :func:`prefill_attn`. ``mass`` says how much attention probability each of the
    last queries puts on the keys that a cut to ``(n_sink, n_recent)`` at the end of the keys would keep: with
    ``T = S_k - seq_start[b]`` real keys, those at positions ``j < n_sink`` (``mass[..., 0]``) and the others with
    ``j >= T - n_recent`` (``mass[..., 1]``; a key that is both counts as a sink), no later than the query. It equals
    :func:`retained_mass` of the last queries, without a call of its own.

    Args:
        q: ``[B, S_q, H_q, D]``, fp16, bf16 or (CPU) fp32.
        k, v: ``[B, S_k, H_kv, D]`` in q's dtype.
        n_sink, n_recent: the window, both at least 0.
        n_last: how many of the last queries to measure.
        scale: of the scores before the softmax, positive; None: ``1 / sqrt(D)``.
        seq_start: int32 ``[B]`` in ``[0, S_k]``, the first real token of a left-padded row; None: 0 in every row.

    Returns:
        ``out [B, S_q, H_q, D]`` in q's dtype, ``lse [B, H_q, S_q]`` in fp32 and ``mass [B, H_q, n_last, 2]`` in fp32.
        ``mass[:, :, -1]`` belongs to the last query; of row ``b`` the last
        ``min(n_last, S_q, S_k - seq_start[b])`` are real queries, and the rows before them are zeros.

    Raises:
        ValueError: shapes, devices, strides or numbers that do not fit.
        TypeError: dtypes that do not fit.

    Example:
        >>> import torch
        >>> from lighttransfer.ops import prefill_attn_lazy
        >>> q, k = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8)
        >>> out, lse, mass = prefill_attn_lazy(q, k, k, n_sink=1, n_recent=2, n_last=2)
        >>> (mass[0, 0] * torch.tensor([[7], [8]])).round().tolist()
        [[1.0, 1.0], [1.0, 2.0]]
    """
    result: tuple[Tensor, Tensor, Tensor] = call(
        "prefill_attn_lazy",
        q,
        k,
        v,
        n_sink=n_sink,
        n_recent=n_recent,
        n_last=n_last,
        scale=scale,
        seq_start=seq_start,
    )
    return result


@torch.library.register_fake("lighttransfer::prefill_attn_lazy")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    n_sink: int,
    n_recent: int,
    n_last: int,
    scale: float | None = None,
    seq_start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n_queries, n_heads, _ = q.shape
    return (
        q.new_empty(q.shape),
        q.new_empty((batch, n_heads, n_queries), dtype=torch.float32),
        q.new_empty((batch, n_heads, n_last, 2), dtype=torch.float32),
    )
