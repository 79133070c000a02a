"""The paged pool that all layers and requests of a cache share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from .._arguments import check_count

#: How much a pool that is out of pages grows by at least: growing copies the pool, so the cost of a token stays
#: constant only if growth is geometric; a small factor keeps the transient (old and new storage at once) small.
_GROWTH = 1.25


class PoolFullError(RuntimeError):
    """A pool of fixed size has no page left."""


class KVPool:
    """Pages of K/V: ``k, v [n_pages, page_size, H_kv, D]``, a free list and reference counts.

    A page belongs to no layer and to no request: what an evicted layer gives back holds the next layer's keys (Figure 3
    of arXiv:2410.13846). Requests that share a prefix share its pages, each counted; whoever writes into a page with
    more than one owner copies it first (:meth:`copy`).

    Every op takes one tensor per side, so a pool is one storage per side and grows by moving into a larger one. Page
    numbers survive growth, so block tables stay valid; tensors taken from :attr:`k` and :attr:`v` before do not. The
    two sides grow one after the other, which bounds the transient by one side. A cache reserves what a prompt needs in
    one step before its first layer, so growth is for decoding.

    Args:
        n_kv_heads, head_dim: shape of a token.
        dtype, device: of the pages.
        page_size: tokens in a page.
        n_pages: pages to start with.
        max_pages: the pool never grows beyond; ``None``: no limit.

    Raises:
        TypeError, ValueError: an argument outside its range.

    Example:
        >>> pool = KVPool(n_kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu", page_size=4, max_pages=3)
        >>> pages = pool.allocate(2)
        >>> pool.bytes_in_use == 2 * pool.page_bytes
        True
        >>> pool.release(pages)
        >>> pool.n_used, pool.bytes_in_use, pool.peak_bytes_in_use == 2 * pool.page_bytes
        (0, 0, True)
    """

    def __init__(
        self,
        *,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        page_size: int = 64,
        n_pages: int = 0,
        max_pages: int | None = None,
    ) -> None:
        for name, value, minimum in (
            ("n_kv_heads", n_kv_heads, 1),
            ("head_dim", head_dim, 1),
            ("page_size", page_size, 1),
            ("n_pages", n_pages, 0),
        ):
            check_count(name, value, minimum)
        if max_pages is not None:
            check_count("max_pages", max_pages, n_pages)
        self.page_size = page_size
        self.max_pages = max_pages
        self.device = torch.device(device)
        self.dtype = dtype
        self._token_shape = (n_kv_heads, head_dim)
        self.k = self._empty(n_pages)  # [n_pages, page_size, H_kv, D]
        self.v = self._empty(n_pages)
        self._owners = [0] * n_pages
        self._free = list(range(n_pages))[
            ::-1
        ]  # a stack: the page given back last is the next one used, still in cache
        self._n_used = 0
        self._peak_used = 0
        self._peak_storage = self.storage_bytes

    def _empty(self, n_pages: int) -> Tensor:
        # A cache outlives the inference_mode block it was filled in, and an inference tensor could not be written
        # outside.
        with torch.inference_mode(False):
            return torch.empty((n_pages, self.page_size, *self._token_shape), dtype=self.dtype, device=self.device)

    @property
    def n_pages(self) -> int:
        """Pages the pool has storage for."""
        return len(self._owners)

    @property
    def n_used(self) -> int:
        """Pages that someone owns."""
        return self._n_used

    @property
    def n_free(self) -> int:
        """Pages that can be allocated without growth."""
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, both sides."""
        heads, head_dim = self._token_shape
        return 2 * self.page_size * heads * head_dim * self.dtype.itemsize

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the pages that someone owns."""
        return self._n_used * self.page_bytes

    @property
    def peak_bytes_in_use(self) -> int:
        """The largest :attr:`bytes_in_use` so far."""
        return self._peak_used * self.page_bytes

    @property
    def storage_bytes(self) -> int:
        """Bytes of the two storages, free pages included."""
        return self.k.untyped_storage().nbytes() + self.v.untyped_storage().nbytes()

    @property
    def peak_storage_bytes(self) -> int:
        """The largest storage so far; while a side grows its old and its new storage count both."""
        return self._peak_storage

    def pages_for(self, n_slots: int) -> int:
        """Pages that hold ``n_slots`` tokens of one layer and request."""
        return -(-n_slots // self.page_size)

    def owners(self, page: int) -> int:
        """How many block tables name ``page``; 0: it is free."""
        return self._owners[page]

    def reserve(self, n_pages: int) -> None:
        """Makes room for ``n_pages`` pages beyond those in use, exactly.

        Raises:
            PoolFullError: that would exceed ``max_pages``; the pool is as it was.
        """
        missing = n_pages - len(self._free)
        if missing > 0:
            self._grow_to(self.n_pages + missing)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` pages, each with one owner. Their contents are undefined.

        Raises:
            PoolFullError: there are not that many; the pool is as it was.
        """
        if count > len(self._free):
            needed = self.n_pages + count - len(self._free)
            target = max(needed, int(self.n_pages * _GROWTH))
            self._grow_to(target if self.max_pages is None else max(needed, min(target, self.max_pages)))
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._owners[page] = 1
        self._n_used += count
        self._peak_used = max(self._peak_used, self._n_used)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each page.

        Raises:
            ValueError: a page that nobody owns; the pool is as it was.
        """
        pages = list(pages)
        self._check_owned(pages)
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes an owner from each page; a page without owners is free.

        Raises:
            ValueError: a page that nobody owns (or named more often than it has owners); the pool is as it was.
        """
        counts = Counter(pages)
        for page, count in counts.items():
            if not 0 <= page < self.n_pages or self._owners[page] < count:
                raise ValueError(f"pages must be owned as often as they are released, got page {page} {count} times")
        for page, count in counts.items():
            self._owners[page] -= count
            if self._owners[page] == 0:
                self._free.append(page)
                self._n_used -= 1

    def copy(self, page: int) -> int:
        """A private copy of a shared ``page``: the caller's share moves to the copy, whose number is returned."""
        self._check_owned([page])
        (copy,) = self.allocate(1)
        self.k[copy].copy_(self.k[page])
        self.v[copy].copy_(self.v[page])
        self.release([page])
        return copy

    def _check_owned(self, pages: list[int]) -> None:
        for page in pages:
            if not 0 <= page < self.n_pages or self._owners[page] == 0:
                raise ValueError(f"pages must be owned, got page {page} of a pool of {self.n_pages}")

    def _grow_to(self, n_pages: int) -> None:
        old = self.n_pages
        if self.max_pages is not None and n_pages > self.max_pages:
            raise PoolFullError(
                f"the pool is full: {n_pages - self._n_used} pages of {self.page_size} tokens asked for, "
                f"{self.max_pages - self._n_used} free of max_pages={self.max_pages}"
            )
        for side in ("k", "v"):
            grown = self._empty(n_pages)
            self._peak_storage = max(self._peak_storage, self.storage_bytes + grown.untyped_storage().nbytes())
            if self._n_used:
                grown[:old].copy_(getattr(self, side))
            setattr(self, side, grown)
        self._owners += [0] * (n_pages - old)
        self._free = list(range(n_pages - 1, old - 1, -1)) + self._free
