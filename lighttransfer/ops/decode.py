"""One decode step over caches that may be full or rings."""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import call


def streaming_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    *,
    n_sink: int,
    n_recent: Tensor,
    mass_n_recent: int = -1,
    block_table: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes one new token per row to its cache slot and attends over what the row then holds.

    The token of row ``b`` has position ``t = seq_len[b]``. A full row (``n_recent[b] == 0``) attends over the positions
    ``0 .. t``; a ring row over ``{j <= t : j < n_sink or j > t - n_recent[b]}``, the streaming mask of the paper's
    section 4, which is what its ``min(t + 1, n_sink + n_recent[b])`` slots hold. Both kinds may share a call. The cache
    layouts and the slot of a position are those of :mod:`lighttransfer.ops.kv`; the caller advances ``seq_len``.

    A row's result does not depend on the other rows, on the width of ``block_table`` or on the number of threads: it
    equals, bit for bit, that of the row alone.

    Args:
        q: ``[B, 1, H_q, D]``, fp16, bf16 or (CPU) fp32.
        k, v: ``[B, 1, H_kv, D]`` in q's dtype; they must not overlap the cache.
        k_cache, v_cache: ``[n_pages, page_size, H_kv, D]`` with ``block_table``, ``[B, capacity, H_kv, D]`` without, in
            q's dtype; changed in place.
        seq_len: int32 ``[B]``, tokens cached before this one; below 0: inactive row, for which nothing is written, and
            which returns ``out = 0``, ``lse = -inf``, ``mass = 0``.
        n_sink: sinks, at least 0.
        n_recent: int32 ``[B]``, ring slots besides the sinks, the new token's included; 0: full row.
        mass_n_recent: at least 0: also return ``mass`` under the window ``(n_sink, mass_n_recent)``.
        block_table: int32 ``[B, max_pages]`` of a paged cache.
        scale: of the scores before the softmax, positive; None: ``1 / sqrt(D)``.

    Returns:
        ``out [B, 1, H_q, D]`` in q's dtype; ``lse [B, H_q, 1]`` in fp32, natural log; ``mass [B, H_q, 2]`` in fp32, the
        attention probability of this step on the sinks ``{j < n_sink, j <= t}`` and on the other kept keys
        ``{j >= n_sink, t - mass_n_recent < j <= t}`` (what a full row would keep if it were cut now: the summands of
        the paper's lazy ratio, section 3.2), or an empty ``[0]`` with ``mass_n_recent < 0``.

    Raises:
        ValueError: shapes, strides, devices or numbers that do not fit; (CPU) a row whose new token finds no slot, a
            page id out of range, a negative ``n_recent``. No buffer has changed then.
        TypeError: dtypes that do not fit; nothing is converted.

    Example:
        >>> import torch
        >>> from lighttransfer.ops import streaming_decode
        >>> k_cache, v_cache = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)
        >>> q, k, v = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 1, 8), torch.full((1, 1, 1, 8), 4.0)
        >>> length, ring = torch.tensor([9], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        >>> out, lse, _ = streaming_decode(q, k, v, k_cache, v_cache, length, n_sink=1, n_recent=ring)
        >>> v_cache[0, :, 0, 0].tolist(), out[0, 0, 0, 0].item(), round(lse[0, 0, 0].item(), 4)
        ([0.0, 0.0, 0.0, 4.0], 1.0, 1.3863)
    """
    result: tuple[Tensor, Tensor, Tensor] = call(
        "streaming_decode",
        q,
        k,
        v,
        k_cache,
        v_cache,
        seq_len,
        n_sink=n_sink,
        n_recent=n_recent,
        mass_n_recent=mass_n_recent,
        block_table=block_table,
        scale=scale,
    )
    return result


@torch.library.register_fake("lighttransfer::streaming_decode")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    *,
    n_sink: int,
    n_recent: Tensor,
    mass_n_recent: int = -1,
    block_table: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, n_heads, head_dim = q.shape
    return (
        q.new_empty((batch, 1, n_heads, head_dim)),
        q.new_empty((batch, n_heads, 1), dtype=torch.float32),
        q.new_empty((batch, n_heads, 2) if mass_n_recent >= 0 else (0,), dtype=torch.float32),
    )
