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
