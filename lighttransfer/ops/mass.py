"""How much attention the last queries put on the keys that a window would keep, and the paper's lazy ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import call


def retained_mass(
    q_last: Tensor,
    k: Tensor,
    lse_last: Tensor,
    *,
    n_sink: int,
    n_recent: int,
    scale: float | None = None,
    seq_start: Tensor | None = None,
) -> Tensor:
    """The attention probability that each of the last queries puts on the sinks and on the other kept keys.

    For users of other attention kernels, which hand over their log-sum-exp (:func:`prefill_attn_lazy` returns the same
    quantity with its own pass). The kept set of a row with ``T = S_k - seq_start[b]`` real tokens is anchored at its
    end: ``{j < n_sink}`` and ``{n_sink <= j, j >= T - n_recent}``, overlaps counted once, each cut at the query's own
    position. Its probability is ``sum of exp(scale * q.k - lse)`` (paper, section 4: the numerator of the lazy ratio),
    with fp32 accumulation. The cost is ``O(H_q * S_q * (n_sink + n_recent) * D)``, whatever ``S_k``.

    Args:
        q_last: ``[B, S_q, H_q, D]``, the last ``S_q`` queries, of which the last one stands at the last key; fp16, bf16
            or (CPU) fp32.
        k: ``[B, S_k, H_kv, D]``, all keys, of the same dtype.
        lse_last: fp32 ``[B, H_q, S_q]``, natural log-sum-exp of those queries over **all** keys they see.
        n_sink: sinks, at least 0.
        n_recent: kept tokens at the end, at least 0.
        scale: softmax scale that ``lse_last`` was taken with, positive; None: ``1 / sqrt(D)``.
        seq_start: int32 ``[B]``, first real token of a left-padded row, in ``[0, S_k]``; None: all 0.

    Returns:
        fp32 ``[B, H_q, S_q, 2]``: on the sinks (``[..., 0]``) and on the other kept keys (``[..., 1]``). A query before
        its row's first token, or with ``lse_last = -inf``, gets zeros.

    Raises:
        ValueError: shapes, strides, devices or numbers that do not fit; (CPU) ``seq_start`` out of range.
        TypeError: dtypes that do not fit.

    Example:
        >>> import math, torch
        >>> from lighttransfer.ops import retained_mass
        >>> q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 10, 1, 8)  # uniform attention over 10 keys
        >>> lse = torch.full((1, 1, 1), math.log(10))
        >>> [round(m, 4) for m in retained_mass(q, k, lse, n_sink=1, n_recent=4).flatten().tolist()]
        [0.1, 0.4]
    """
    result: Tensor = call(
        "retained_mass", q_last, k, lse_last, n_sink=n_sink, n_recent=n_recent, scale=scale, seq_start=seq_start
    )
    return result


@torch.library.register_fake("lighttransfer::retained_mass")
def _(
    q_last: Tensor,
    k: Tensor,
    lse_last: Tensor,
    *,
    n_sink: int,
    n_recent: int,
    scale: float | None = None,
    seq_start: Tensor | None = None,
) -> Tensor:
    batch, n_queries, n_heads, _ = q_last.shape
    return q_last.new_empty((batch, n_heads, n_queries, 2), dtype=torch.float32)


def lazy_ratio(mass: Tensor, *, n_queries: Tensor | None = None) -> Tensor:
    """The paper's lazy ratio ``r`` of one layer: the mean retained probability over heads and last queries.

    Probabilities are averaged, not their logarithms. A layer with a ratio near 1 attends to sinks and recent tokens
    alone and is cut first.

    Args:
        mass: fp32 ``[B, H_q, n_last, 2]``, contiguous, of :func:`retained_mass` or :func:`prefill_attn_lazy`.
        n_queries: int32 ``[B]``, how many trailing queries of each row are real, in ``[0, n_last]``; None: all.

    Returns:
        fp32 ``[B]``; 1 for a row without queries, which says nothing against cutting it.

    Raises:
        ValueError: shapes, strides or devices that do not fit; (CPU) ``n_queries`` out of range.
        TypeError: dtypes that do not fit.

    Example:
        >>> import torch
        >>> from lighttransfer.ops import lazy_ratio
        >>> mass = torch.tensor([[[[0.0, 0.0], [0.25, 0.5]]]])  # one head, two queries
        >>> lazy_ratio(mass).item(), lazy_ratio(mass, n_queries=torch.tensor([1], dtype=torch.int32)).item()
        (0.375, 0.75)
    """
    result: Tensor = call("lazy_ratio", mass, n_queries=n_queries)
    return result


@torch.library.register_fake("lighttransfer::lazy_ratio")
def _(mass: Tensor, *, n_queries: Tensor | None = None) -> Tensor:
    return mass.new_empty((mass.shape[0],))
