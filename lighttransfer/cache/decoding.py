"""The host's part of decode steps: pages, what a step measures, counting; and all of it that can be done ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._arguments import check_count
from .budget import answer_pages
from .part import CachePart

if TYPE_CHECKING:
    from .paged_cache import PagedCache


class Decoding(CachePart):
    """What the host does before and after decode steps.

    The step itself, one token per row through all layers, is the device's alone: lengths, windows and block tables are
    tensors whose values change in place. It needs no value of the host's and allocates nothing, so it can be compiled
    in one graph and captured in a CUDA graph. What needs the host lies between steps: a page where a row's last one is
    full, a deferred choice of layers, counting. A step that the host does not see, because it is compiled or replayed,
    stands between :meth:`open` and :meth:`close`.

    Attributes:
        is_open: a step is prepared; what the model does now is that step and leaves the host alone.
        mass_n_recent: the window whose mass the step measures while a choice is deferred; -1: none.
        n_measured: steps that have measured and were not collected yet.
        reserved: for each row the length up to which it keeps pages that its tokens do not need yet.
    """

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache)
        self.begin(0)

    def begin(self, n_rows: int) -> None:
        """A new batch."""
        self.is_open = False
        self.mass_n_recent = -1
        self.n_measured = 0
        self.reserved = [0] * n_rows
        self.wake([0] * n_rows)

    def select(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes row ``rows[i]``."""
        self.reserved = [self.reserved[row] for row in rows]

    def wake(self, lengths: Sequence[int]) -> None:
        """Before the next step the host looks at every row, whose lengths these are."""
        self._quiet = 0  # decode steps for which the host has nothing to do
        self._wake_at = list(lengths)  # for each row the length at which it has

    # One step.

    def before(self) -> None:
        """Prepares a step: every row has a page for its token."""
        if self._quiet == 0:
            self._prepare()

    def after(self) -> None:
        """The step is done: counts its token, and chooses layers if that is due."""
        cache = self.cache
        self._quiet -= 1
        cache.count_token()
        if self.mass_n_recent >= 0 and not cache.records_past:
            self.n_measured += 1
            if cache.choice.is_due:
                self.collect()
                cache.choice.after_decode()

    def collect(self) -> None:
        """Brings what steps have measured to the layers, where choices are made of it."""
        n_steps, self.n_measured = self.n_measured, 0
        for layer in self.cache.competing if n_steps else []:
            layer.collect(n_steps)

    def forget(self) -> None:
        """What was measured so far has nothing to do with what comes."""
        self.n_measured = 0

    def open(self) -> None:
        """Prepares a step that the host will not see."""
        self.before()
        self.is_open = True

    def close(self) -> None:
        """That step is done."""
        self.is_open = False
        self.after()

    @contextmanager
    def step(self) -> Iterator[None]:
        """See :meth:`~lighttransfer.cache.LightTransferCache.decode_step`."""
        self._check("decode_step()")
        self.open()
        try:
            yield
        except BaseException:
            self.is_open = False  # how far the device came is not known: the cache needs reset()
            raise
        self.close()

    def can_step(self) -> bool:
        """Whether the next call of one token per row is a decode step that can go without the host."""
        cache = self.cache
        return bool(cache.lengths) and not cache.prefill_is_open and not cache.records_past

    def _check(self, name: str) -> None:
        cache = self.cache
        if self.is_open:
            raise RuntimeError(f"{name} cannot stand inside decode_step()")
        if not cache.lengths or cache.prefill_is_open:
            raise RuntimeError(f"{name} needs a cache that has read its prompt to the end")
        if cache.records_past:
            raise RuntimeError(f"{name} cannot be used while calls are recorded: stop_recording() comes first")

    @property
    def graph_key(self) -> tuple[int, ...]:
        """See :attr:`~lighttransfer.cache.LightTransferCache.graph_key`."""
        tensors = ((tensor.data_ptr(), tensor.numel()) for tensor in self._tensors())
        return (self.mass_n_recent, *(value for pair in tensors for value in pair))

    def _prepare(self) -> None:
        cache = self.cache
        if cache.is_compileable and cache.max_length is not None:
            self._make_room(cache.max_length)
        rows = [row for row in range(len(cache.lengths)) if row not in cache.finished]
        due = [row for row in rows if cache.lengths[row] >= self._wake_at[row]]
        for layer in cache.attention_layers:
            for row in due:
                self._wake_at[row] = 0
                layer.prepare_decode(row, cache.lengths[row])
            layer.blocks.flush()
        measures = cache.choice.measures(1)
        self.mass_n_recent = cache.settings.n_recent if measures else -1
        if not measures:
            cache.choice.forget()
        elif self.n_measured == 0:
            self._begin_measuring()
        for row in due:
            self._wake_at[row] = cache.choice.wake_at(row)
        self._quiet = max(1, min((self._wake_at[row] - cache.lengths[row] for row in rows), default=1))
        if cache.is_compileable:
            self._mark_static()

    def _begin_measuring(self) -> None:
        for clock in self.cache.clocks.values():
            clock.restart()
        for layer in self.cache.competing:
            layer.begin_measuring()

    # Ahead of time.

    def reserve(self, n_tokens: int) -> None:
        """See :meth:`~lighttransfer.cache.LightTransferCache.reserve`."""
        self._check("reserve()")
        cache = self.cache
        check_count("n_tokens", n_tokens, 0)
        lengths = [n if row in cache.finished else n + n_tokens for row, n in enumerate(cache.lengths)]
        for pool in cache.pools.values():
            pool.reserve(sum(layer.n_missing(lengths) for layer in cache.attention_layers if layer.pool is pool))
        self.reserved = lengths if n_tokens else [0] * len(lengths)
        for layer in cache.attention_layers:
            layer.resize(cache.lengths)
            layer.blocks.flush()
        self.wake(cache.lengths)

    def _make_room(self, length: int) -> None:
        """Pools and block tables for rows of ``length`` tokens, so that until then no tensor has to be replaced."""
        cache = self.cache
        for layer in cache.attention_layers:
            layer.blocks.widen(layer.pool.pages_for(length if layer.competes else layer.window.n_slots(length)))
        for pool in cache.pools.values():
            peak = sum(answer_pages(cache, pool, length, is_decided) for is_decided in cache.choice.is_decided)
            pool.reserve(peak - pool.n_used)

    def _mark_static(self) -> None:
        """Tells torch.compile that the tensors stay where they are, so that its CUDA graphs need no copies of them."""
        for tensor in self._tensors():
            torch._dynamo.mark_static_address(tensor)

    def _tensors(self) -> list[Tensor]:
        """Everything of the cache that a step reads or writes."""
        cache = self.cache
        tensors = [tensor for pool in cache.pools.values() for tensor in (pool.k, pool.v)]
        tensors += [tensor for clock in cache.clocks.values() for tensor in clock.tensors()]
        return tensors + [tensor for layer in cache.attention_layers for tensor in layer.tensors()]
