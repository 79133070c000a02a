"""Taking tokens back from rings: what a call has overwritten, kept until the next ``crop``.

A full layer forgets tokens by counting less. A ring has put them where older ones were, which come back into the window
when the tokens go: a draft that is rejected must leave no trace. What no record knows is gone for good: a ring that has
wrapped can be taken back to its sinks, which it never overwrites, and otherwise not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import ops

if TYPE_CHECKING:
    from .calls import Keys
    from .layer import CacheLayer
    from .rows import Rows


class RecordedCall(NamedTuple):
    """A call that was recorded: its columns, and whether it cannot be taken back: it was padded, or cut layers."""

    n_tokens: int
    is_final: bool


class Undo(Protocol):
    """What one call did to one layer's rings."""

    def undo(self, layer: CacheLayer, n_tokens: int) -> None:
        """Takes back the call's last ``n_tokens`` tokens."""


@dataclass
class ChunkUndo:
    """A call of several tokens.

    Attributes:
        rows: the rows whose layer is a ring.
        lengths: their tokens before the call.
        keys: what the call's queries saw, which is what the rings held, and the chunk.
    """

    rows: list[int]
    lengths: list[int]
    keys: Keys

    def undo(self, layer: CacheLayer, n_tokens: int) -> None:
        """Writes again what the rings held and what of the chunk stays, from the oldest recent token on."""
        device, window = layer.pool.device, layer.window
        begin = [window.recent_begin(length) for length in self.lengths]
        sinks = [min(window.n_sink, length) for length in self.lengths]
        start = torch.tensor(sinks, dtype=torch.int32, device=device)
        if self.keys.start is not None:
            start = start + self.keys.start
        index = torch.tensor(self.rows, device=device)
        end = self.keys.k.shape[1] - n_tokens
        ops.append_kv_(
            layer.pool.k,
            layer.pool.v,
            self.keys.k[:, :end],
            self.keys.v[:, :end],
            torch.tensor(begin, dtype=torch.int32, device=device),
            n_sink=layer.n_sink,
            n_recent=layer.n_recent[index],
            block_table=layer.blocks.flush()[index],
            seq_start=start,
        )


@dataclass
class TokenUndo:
    """A decode step: the tokens that the new ones replaced, at ``(page, offset)``; ``k, v [n, H_kv, D]``."""

    page: Tensor
    offset: Tensor
    k: Tensor
    v: Tensor

    def undo(self, layer: CacheLayer, n_tokens: int) -> None:
        """Puts them back."""
        layer.pool.k[self.page, self.offset] = self.k
        layer.pool.v[self.page, self.offset] = self.v


def token_undo(layer: CacheLayer, lengths: Sequence[int]) -> TokenUndo | None:
    """What the next decode step of rows with ``lengths`` tokens will replace; ``None``: the layer has no ring."""
    if not any(layer.recent):
        return None
    pages, offsets = [], []
    for row, length in enumerate(lengths):
        if layer.recent[row] > 0 and length >= layer.window.size:
            at, offset = divmod(layer.window.slot(length), layer.pool.page_size)
            pages.append(layer.blocks.pages[row][at])
            offsets.append(offset)
    page = torch.tensor(pages, dtype=torch.int64, device=layer.pool.device)
    offset_of = torch.tensor(offsets, dtype=torch.int64, device=layer.pool.device)
    return TokenUndo(page, offset_of, layer.pool.k[page, offset_of], layer.pool.v[page, offset_of])


def _has_wrapped(layer: CacheLayer, row: int, length: int) -> bool:
    return layer.recent[row] > 0 and not layer.window.keeps_all(length)


def is_whole(cache: Rows) -> bool:
    """Whether no ring has overwritten anything, so that tokens go by counting less."""
    return not any(
        layer.is_initialized and _has_wrapped(layer, row, length)
        for layer in cache.attention_layers
        for row, length in enumerate(cache.lengths)
    )


def lost_rows(cache: Rows, n_tokens: Sequence[int]) -> list[int]:
    """The rows in which a ring no longer holds what it would need without the row's last ``n_tokens[row]`` tokens."""
    return [
        row
        for row, (length, n) in enumerate(zip(cache.lengths, n_tokens, strict=True))
        if n > 0
        and any(_has_wrapped(layer, row, length) and length - n > layer.n_sink for layer in cache.attention_layers)
    ]


def put_back(cache: Rows, n_tokens: int) -> None:
    """Makes every ring hold what it held without the last ``n_tokens`` tokens of every row.

    Raises:
        ValueError: what they overwrote is gone; nothing has changed.
    """
    lost = lost_rows(cache, [n_tokens] * len(cache.lengths))
    if not lost:
        return
    reach = _recorded_reach(cache)
    if reach < n_tokens:
        sinks = min(layer.n_sink for layer in cache.attention_layers if any(map(layer.recent.__getitem__, lost)))
        raise ValueError(
            f"tokens_to_remove must be at least {-reach}, which is how far the recorded calls go back, or leave no row "
            f"more than its {sinks} sinks, got {-n_tokens}: in rows {lost} a streaming layer's ring has wrapped, and "
            "what its last tokens overwrote is gone unless activate_past_recording() came before them"
        )
    for at in range(len(cache.recorded) - 1, -1, -1):
        count = min(n_tokens, cache.recorded[at].n_tokens)
        for layer in cache.attention_layers:
            undo = layer.undo[at]
            if undo is not None and count > 0:
                undo.undo(layer, count)
        n_tokens -= count


def _recorded_reach(cache: Rows) -> int:
    """How many of the last tokens the recorded calls can put back in every row."""
    wrapped = [
        layer
        for layer in cache.attention_layers
        if any(_has_wrapped(layer, row, length) for row, length in enumerate(cache.lengths))
    ]
    reach = 0
    for at in range(len(cache.recorded) - 1, -1, -1):
        call = cache.recorded[at]
        if call.is_final or any(layer.undo[at] is None for layer in wrapped):
            break
        reach += call.n_tokens
    return reach
