"""Moves of cached keys and values: compaction into a ring, appending a chunk, gathering in position order.

A cache is either **paged**, ``k_cache, v_cache [n_pages, page_size, H_kv, D]`` with ``block_table [B, max_pages]``
(int32), whose entry ``[b, i]`` is the page that holds row ``b``'s slots ``[i * page_size, (i + 1) * page_size)``, or
**contiguous**, ``[B, capacity, H_kv, D]`` with ``block_table=None``. Any strides with unit stride in ``D``; no two
elements may share memory.

Position ``p`` of a row lies in slot ``p`` while ``p < n_sink``, else in slot
``n_sink + (p - n_sink) mod n_recent``; ``n_recent = 0`` marks a full row, whose slot is its position.
``seq_len[b]`` counts the tokens that row ``b`` has seen; below 0 the row is inactive and left alone.

On the CPU every row is checked before anything is written, so an error leaves all buffers as they were. On a GPU,
where ``seq_len``, ``n_recent``, ``seq_start``, ``rows`` and ``block_table`` are read by the kernels alone, tokens
whose slot lies beyond the capacity or in an unmapped page are skipped. Two rows must not share a page that is
written; that is not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import call


def compact_kv_(
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    *,
    n_sink: int,
    n_recent: int,
    block_table: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """Cuts full rows to sinks and recent window, in place: what evicting a layer does to its cache (paper, Figure 3).

    Row ``b`` holds ``seq_len[b]`` tokens in the full layout (slot = position). Of them the first ``n_sink`` and the
    last ``n_recent`` survive and end up in their ring slots; the slots from ``n_sink + n_recent`` on, and with them
    the pages above ``ceil((n_sink + n_recent) / page_size)``, are free for others. A row that fits the window is
    left as it is: a ring that has not wrapped looks like a full row.

    Args:
        k_cache, v_cache: the cache, fp16, bf16 or (CPU) fp32; changed in place.
        seq_len: int32 ``[B]``, tokens cached; below 0: inactive row.
        n_sink: sinks, at least 0.
        n_recent: ring slots besides the sinks, at least 1.
        block_table: int32 ``[B, max_pages]`` of a paged cache.
        rows: int32 ``[n]``, the rows to compact, each named once; None: all.

    Raises:
        ValueError: shapes, strides or devices that do not fit; ``n_recent < 1``; (CPU) a row longer than its capacity,
            a page id out of range, ``rows`` out of range or repeated.
        TypeError: dtypes that do not fit.

    Example:
        >>> import torch
        >>> from lighttransfer.ops import compact_kv_
        >>> k = torch.arange(10.0).reshape(1, 10, 1, 1).repeat(1, 1, 1, 8)
        >>> compact_kv_(k, k.clone(), torch.tensor([9], dtype=torch.int32), n_sink=1, n_recent=3)
        >>> k[0, :4, 0, 0].tolist()  # positions 0 | 7, 8, 6
        [0.0, 7.0, 8.0, 6.0]
    """
    call(
        "compact_kv_",
        k_cache,
        v_cache,
        seq_len,
        n_sink=n_sink,
        n_recent=n_recent,
        block_table=block_table,
        rows=rows,
    )


@torch.library.register_fake("lighttransfer::compact_kv_")
def _(
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    *,
    n_sink: int,
    n_recent: int,
    block_table: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    return None


def append_kv_(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seq_len: Tensor,
    *,
    n_sink: int,
    n_recent: Tensor,
    block_table: Tensor | None = None,
    seq_start: Tensor | None = None,
) -> None:
    """Writes a chunk of keys and values to its slots.

    Row ``b``'s real tokens ``k[b, seq_start[b]:]`` get the positions ``seq_len[b], seq_len[b] + 1, ...``. Of a chunk
    longer than the row's ring only what survives it is written: the sinks and the last ``n_recent[b]`` tokens. The
    caller advances ``seq_len``.

    Args:
        k_cache, v_cache: the cache, fp16, bf16 or (CPU) fp32; changed in place.
        k, v: ``[B, S, H_kv, D]`` in the cache's dtype; they must not overlap the cache.
        seq_len: int32 ``[B]``, tokens cached **before** this chunk; below 0: inactive row, nothing is written.
        n_sink: sinks, at least 0.
        n_recent: int32 ``[B]``, ring slots besides the sinks; 0: full row.
        block_table: int32 ``[B, max_pages]`` of a paged cache.
        seq_start: int32 ``[B]``, first real token of a left-padded chunk, in ``[0, S]``; None: all 0.

    Raises:
        ValueError: shapes, strides or devices that do not fit; (CPU) a row that needs more slots than its capacity,
            a page id out of range, a negative ``n_recent``, ``seq_start`` out of range.
        TypeError: dtypes that do not fit; nothing is converted.

    Example:
        >>> import torch
        >>> from lighttransfer.ops import append_kv_
        >>> cache, chunk = torch.zeros(1, 4, 1, 8), torch.arange(6.0).reshape(1, 6, 1, 1).repeat(1, 1, 1, 8)
        >>> length, ring = torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        >>> append_kv_(cache, cache.clone(), chunk, chunk, length, n_sink=1, n_recent=ring)
        >>> cache[0, :, 0, 0].tolist()  # positions 0 | 4, 5, 3
        [0.0, 4.0, 5.0, 3.0]
    """
    call(
        "append_kv_",
        k_cache,
        v_cache,
        k,
        v,
        seq_len,
        n_sink=n_sink,
        n_recent=n_recent,
        block_table=block_table,
        seq_start=seq_start,
    )


@torch.library.register_fake("lighttransfer::append_kv_")
def _(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seq_len: Tensor,
    *,
    n_sink: int,
    n_recent: Tensor,
    block_table: Tensor | None = None,
    seq_start: Tensor | None = None,
) -> None:
    return None


def gather_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    *,
    n_sink: int,
    n_recent: Tensor,
    max_len: int,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cached keys and values in position order, right-aligned: what a step of several tokens attends over.

    Row ``b`` holds ``n = seq_len[b]`` tokens, a ring row ``min(seq_len[b], n_sink + n_recent[b])``; they fill
    ``[max_len - n, max_len)`` and the front is zeros. The keys of a ring row are the sinks followed by the recent
    ones, so their positions are not consecutive once the ring has wrapped.

    Args:
        k_cache, v_cache: the cache, fp16, bf16 or (CPU) fp32.
        seq_len: int32 ``[B]``, tokens cached; below 0: inactive row, which comes back empty.
        n_sink: sinks, at least 0.
        n_recent: int32 ``[B]``, ring slots besides the sinks; 0: full row.
        max_len: length of the outputs; at least every row's ``n``.
        block_table: int32 ``[B, max_pages]`` of a paged cache.

    Returns:
        ``k, v [B, max_len, H_kv, D]`` in the cache's dtype, and ``seq_start`` int32 ``[B]``, the first filled index
        ``max_len - n`` of each row (on a GPU, where ``max_len`` cannot be checked, at least 0: a longer row keeps
        its last ``max_len`` tokens).

    Raises:
        ValueError: shapes, strides or devices that do not fit; (CPU) a row longer than ``max_len`` or its capacity,
            a page id out of range, a negative ``n_recent``.
        TypeError: dtypes that do not fit.

    Example:
        >>> import torch
        >>> from lighttransfer.ops import gather_kv
        >>> ring = torch.tensor([0.0, 7.0, 8.0, 6.0]).reshape(1, 4, 1, 1).repeat(1, 1, 1, 8)
        >>> length, n_recent = torch.tensor([9], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        >>> k, v, start = gather_kv(ring, ring.clone(), length, n_sink=1, n_recent=n_recent, max_len=5)
        >>> k[0, :, 0, 0].tolist(), start.tolist()
        ([0.0, 0.0, 6.0, 7.0, 8.0], [1])
    """
    result: tuple[Tensor, Tensor, Tensor] = call(
        "gather_kv",
        k_cache,
        v_cache,
        seq_len,
        n_sink=n_sink,
        n_recent=n_recent,
        max_len=max_len,
        block_table=block_table,
    )
    return result


@torch.library.register_fake("lighttransfer::gather_kv")
def _(
    k_cache: Tensor,
    v_cache: Tensor,
    seq_len: Tensor,
    *,
    n_sink: int,
    n_recent: Tensor,
    max_len: int,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (seq_len.shape[0], max_len, k_cache.shape[2], k_cache.shape[3])
    return k_cache.new_empty(shape), v_cache.new_empty(shape), seq_len.new_empty(seq_len.shape)
