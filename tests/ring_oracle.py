"""What a cache must hold, kept as Python lists, and caches of every layout to compare it with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

LAYOUTS = ["contiguous", "padded", "head_major", "paged", "paged_padded", "paged_interleaved", "paged_unaligned"]


@dataclass
class Row:
    """One row of a cache: ``slots[i]`` is the (position, k, v) in slot ``i``; ``n_recent`` None: a full row."""

    n_sink: int
    n_recent: int | None = None
    length: int = 0
    slots: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    def append(self, k: Tensor, v: Tensor) -> None:
        token = (self.length, k.clone(), v.clone())
        self.length += 1
        if self.n_recent is None or len(self.slots) < self.n_sink + self.n_recent:
            self.slots.append(token)
        else:  # the oldest token that is not a sink makes room
            oldest = min(range(self.n_sink, len(self.slots)), key=lambda i: self.slots[i][0])
            self.slots[oldest] = token

    def compact(self, n_recent: int) -> None:
        """A full row becomes the ring that has seen the same tokens."""
        assert self.n_recent is None
        tokens, self.n_recent, self.length, self.slots = self.slots, n_recent, 0, []
        for _, k, v in tokens:
            self.append(k, v)

    def in_order(self) -> list[tuple[int, Tensor, Tensor]]:
        return sorted(self.slots, key=lambda token: token[0])


def random_bits(shape: Iterable[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every bit pattern, NaN included: a move must keep them all."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max, tuple(shape), dtype=integer, generator=generator).view(dtype)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int16)


@dataclass
class Cache:
    """K and V of one layer; ``base`` is all memory that they are views of."""

    base: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    page_size: int

    def slot(self, row: int, slot: int) -> tuple[Tensor, Tensor]:
        """Views [H_kv, D] of one slot's key and value."""
        if self.table is None:
            return self.k[row, slot], self.v[row, slot]
        page = int(self.table[row, slot // self.page_size])
        return self.k[page, slot % self.page_size], self.v[page, slot % self.page_size]

    def expect(self, before: Tensor, rows: Iterable[Row]) -> None:
        """The rows' slots hold what the oracle holds; every other byte is still that of ``before``."""
        after = bits(self.base).clone()
        self.base.copy_(before)
        for b, row in enumerate(rows):
            for i, (_, k, v) in enumerate(row.slots):
                slot_k, slot_v = self.slot(b, i)
                slot_k.copy_(k)
                slot_v.copy_(v)
        assert torch.equal(after, bits(self.base))


def make_cache(
    layout: str,
    *,
    batch: int,
    capacity: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    page_size: int = 4,
    seed: int = 0,
) -> Cache:
    """A cache full of random bits. Paged ones have a scattered table with unmapped entries (-1) past the capacity."""
    g = torch.Generator().manual_seed(seed)

    def base(*shape: int) -> Tensor:
        return random_bits(shape, dtype, g).to(device)

    if layout == "contiguous":
        b = base(2, batch, capacity, heads, dim)
        return Cache(b, b[0], b[1], None, capacity)
    if layout == "padded":
        b = base(2, batch + 1, capacity + 2, heads + 1, dim + 8)
        view = b[:, 1:, 1:-1, :heads, 8:]
        return Cache(b, view[0], view[1], None, capacity)
    if layout == "head_major":
        b = base(2, batch, heads, capacity, dim)
        view = b.transpose(2, 3)
        return Cache(b, view[0], view[1], None, capacity)

    pages_per_row = -(-capacity // page_size)
    n_pages = batch * pages_per_row + 3
    ids = torch.randperm(n_pages, generator=g)[: batch * pages_per_row].reshape(batch, pages_per_row)
    table = torch.cat([ids, torch.full((batch, 2), -1)], 1).int().to(device)
    if layout == "paged":
        b = base(2, n_pages, page_size, heads, dim)
        return Cache(b, b[0], b[1], table, page_size)
    if layout == "paged_padded":
        b = base(2, n_pages, page_size + 1, heads + 2, dim + 8)
        view = b[:, :, 1:, 1:-1, :dim]
        wide_table = torch.cat([table, table], 1)[:, : table.shape[1]]  # rows further apart than their length
        return Cache(b, view[0], view[1], wide_table, page_size)
    if layout == "paged_unaligned":  # for kernels that would rather move 16 bytes at a time
        b = base(2, n_pages, page_size, heads, dim + 1)
        view = b[..., 1:]
        return Cache(b, view[0], view[1], table, page_size)
    assert layout == "paged_interleaved", layout
    b = base(n_pages, 2, page_size, heads, dim)
    return Cache(b, b[:, 0], b[:, 1], table, page_size)
