"""Taking tokens back from rings: what a call has overwritten, kept until the next ``crop``.

A full layer forgets tokens by counting less. A ring has put them where older ones were, which come back into the window
when
the tokens go: a draft that is rejected must leave no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from . import ops

if TYPE_CHECKING:
    from .layers import CacheLayer
    from .steps import Keys


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
