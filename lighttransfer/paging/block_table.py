"""One layer's pages: which page of the pool holds which slots of which request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .pool import KVPool


class BlockTable:
    """The pages of every row of one layer, as lists for the host and as a table for the ops.

    Attributes:
        pool: where the pages live.
        pages: for each row its pages in slot order.
        tensor: int32 ``[n_rows, n_columns]`` on the pool's device; entries beyond a row's pages are -1. Call
            :meth:`flush` after changes and before the next op; the tensor may be another one then.
    """

    def __init__(self, pool: KVPool, n_rows: int) -> None:
        self.pool = pool
        self.pages: list[list[int]] = [[] for _ in range(n_rows)]
        self._dirty = False
        self._host = torch.empty(0, dtype=torch.int32)
        self._build(1)

    def _build(self, n_columns: int) -> None:
        """Writes the table anew, in the same tensors where their shape is the same."""
        if self._host.shape == (len(self.pages), n_columns):
            self._host.fill_(-1)
        else:
            with torch.inference_mode(False):
                self._host = torch.full((len(self.pages), n_columns), -1, dtype=torch.int32)
                self.tensor = self._host.to(self.pool.device)
        for row, pages in enumerate(self.pages):
            self._array[row, : len(pages)] = pages
        self._dirty = True

    @property
    def _array(self) -> npt.NDArray[np.int32]:
        return self._host.numpy()

    def n_slots(self, row: int) -> int:
        """Slots that the row's pages can hold."""
        return len(self.pages[row]) * self.pool.page_size

    def resize(self, row: int, n_slots: int) -> int:
        """Gives the row exactly the pages that ``n_slots`` slots need; returns by how many pages it grew.

        Raises:
            PoolFullError: the pool lacks the pages; nothing changed.
        """
        pages = self.pages[row]
        wanted = self.pool.pages_for(n_slots)
        had = len(pages)
        if wanted > had:
            pages += self.pool.allocate(wanted - had)
            if wanted > self._array.shape[1]:
                self._build(max(wanted, 2 * self._array.shape[1]))
            else:
                self._array[row, had:wanted] = pages[had:]
        elif wanted < had:
            self.pool.release(pages[wanted:])
            del pages[wanted:]
            self._array[row, wanted:had] = -1
        self._dirty |= wanted != had
        return wanted - had

    def widen(self, n_columns: int) -> None:
        """Makes the table wide enough for ``n_columns`` pages in a row, so that it stays the same tensor until then."""
        if n_columns > self._array.shape[1]:
            self._build(n_columns)

    def own(self, row: int, begin_slot: int, end_slot: int) -> None:
        """Makes the pages of the slots ``[begin_slot, end_slot)`` the row's own before they are written."""
        pages = self.pages[row]
        for at in range(begin_slot // self.pool.page_size, self.pool.pages_for(end_slot)):
            if self.pool.owners(pages[at]) > 1:
                pages[at] = self.pool.copy(pages[at])
                self._array[row, at] = pages[at]
                self._dirty = True

    def select(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes what row ``rows[i]`` was; rows named more than once share their pages."""
        old = self.pages
        self.pages = [list(old[row]) for row in rows]
        for pages in self.pages:
            self.pool.share(pages)
        for pages in old:
            self.pool.release(pages)
        self._build(self._array.shape[1])

    def release(self) -> None:
        """Gives every page back."""
        for row in range(len(self.pages)):
            self.resize(row, 0)

    def flush(self) -> Tensor:
        """Brings :attr:`tensor` up to date with :attr:`pages` and returns it."""
        if self._dirty:
            self._dirty = False
            if self.tensor is not self._host:
                self.tensor.copy_(self._host)
        return self.tensor
