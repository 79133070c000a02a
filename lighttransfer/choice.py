"""Which layers each request of a batch keeps: when that is decided, and what follows from it for the cache."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .prompt import signal_from_cache
from .selection import LayerSelector, LayerSignal, reduce_over_ranks

if TYPE_CHECKING:
    from .layers import CacheLayer
    from .paged_cache import PagedCache
    from .pool import KVPool
    from .steps import PromptStep


class Reading:
    """Scores on their way to the host: they are copied when the device gets there and waited for when they are used."""

    def __init__(self, scores: Tensor) -> None:
        self._host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        self._host.copy_(scores, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(scores.device))

    def wait(self) -> list[float]:
        """The scores."""
        self._copied.synchronize()
        return [float(score) for score in self._host.tolist()]


def reads_late(scores: Tensor) -> bool:
    """Whether scores are used one layer late, so that no layer waits for the host to have read them."""
    return scores.is_cuda


class LayerChoice:
    """The choices of a cache's rows.

    A row is *open* until its layers are chosen; all its layers are full until then. Rows choose for themselves: what a
    row decides depends on its own tokens alone.

    Attributes:
        n_full: layers that a row keeps whole.
        is_decided: for each row whether it has chosen.
        scores: for each row the score of each layer that was looked at.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache_ref = weakref.ref(cache)
        self._policy = cache.settings.policy
        self._indices = [layer.index for layer in cache.competing]
        self.n_full = cache.settings.n_full(len(self._indices))
        self._fixed = self._policy.full_layers(self._indices, self.n_full) if self._policy.is_fixed else None
        self._limit = int(cache.settings.defer_windows * cache.settings.window.size)
        self._reading: tuple[CacheLayer, Sequence[int], Reading] | None = None
        self.begin(0)

    @property
    def _cache(self) -> PagedCache:
        cache = self._cache_ref()
        assert cache is not None
        return cache

    def belong_to(self, cache: PagedCache) -> None:
        """Moves the choice to a copy of its cache."""
        self._cache_ref = weakref.ref(cache)

    def begin(self, n_rows: int) -> None:
        """Nothing is chosen for ``n_rows`` rows; with every layer full there is nothing to choose."""
        self.is_decided = [self.n_full >= len(self._indices)] * n_rows
        self.scores: list[dict[int, float]] = [{} for _ in range(n_rows)]
        self._selectors = [LayerSelector(self.n_full) for _ in range(n_rows)]
        self._prompt_lengths = [0] * n_rows  # tokens up to the end of the latest prompt

    def select(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes row ``rows[i]``."""
        self.is_decided = [self.is_decided[row] for row in rows]
        self.scores = [dict(self.scores[row]) for row in rows]
        self._selectors = [copy.deepcopy(self._selectors[row]) for row in rows]
        self._prompt_lengths = [self._prompt_lengths[row] for row in rows]

    @property
    def is_open(self) -> bool:
        """Whether some row has yet to choose."""
        return not all(self.is_decided)

    def due(self, lengths: Sequence[int]) -> list[int]:
        """The rows that choose at the end of a prompt after which they have ``lengths`` tokens."""
        window = self._cache.settings.window
        return [
            row
            for row, length in enumerate(lengths)
            if not self.is_decided[row] and (self._fixed is not None or not window.keeps_all(length))
        ]

    def n_pages(self, pool: KVPool, step: PromptStep) -> int:
        """Pages that a first prompt needs at its peak, and some decode steps after it if their number is known."""
        cache, n_layers = self._cache, len(self._indices)
        # Where scores come one layer late, one layer more is full for a while.
        late = 1 if pool.device.type == "cuda" and self._fixed is None else 0
        prompt, later = 0, 0
        for row, length in enumerate(step.totals):
            is_decided = self.is_decided[row] or row in step.decides
            n_full = self.n_full if is_decided else n_layers
            grown = max(length, min(cache.max_length or 0, length + max(256, length // 4)))
            prompt += self._row_pages(pool, length, min(n_full + late, n_layers))
            later += self._row_pages(pool, grown, n_full)
        return max(prompt, later)

    def _row_pages(self, pool: KVPool, length: int, n_full: int) -> int:
        """Pages of a row's ``length`` tokens with ``n_full`` of the competing layers whole and the others cut."""
        window = self._cache.settings.window
        pages = n_full * pool.pages_for(length)
        pages += (len(self._indices) - n_full) * pool.pages_for(window.n_slots(length))
        for layer in self._cache.attention_layers:
            if not layer.competes:
                pages += pool.pages_for(layer.window.n_slots(length))
        return pages

    # At a prompt's end, layer by layer.

    def take_fixed(self, layer: CacheLayer, step: PromptStep) -> None:
        """A fixed policy's layer: its rows' keys go where they belong from the start."""
        assert self._fixed is not None
        if layer.index not in self._fixed:
            self._cut(layer, step.decides, step)

    def take(self, layer: CacheLayer, signal: LayerSignal, rows: Sequence[int], step: PromptStep) -> None:
        """Scores a layer; the heaps of the rows that decide cut what they hold too many.

        ``rows`` are the signal's rows. On CUDA the score is used when the next layer comes, so that none waits for it.
        """
        scores = reduce_over_ranks(self._policy.score(signal), self._policy.reduction, self._cache.process_group)
        self._settle_reading(step)
        if reads_late(scores):
            self._reading = (layer, rows, Reading(scores))
        else:
            self._push(layer, rows, scores.tolist(), step)

    def settle(self, step: PromptStep) -> None:
        """The last layer of a prompt has come."""
        self._settle_reading(step)
        for row in step.decides:
            self.is_decided[row] = True
        self._prompt_lengths = list(step.totals)
        if not step.keeps_queries:
            self._forget()

    def _settle_reading(self, step: PromptStep | None) -> None:
        if self._reading is not None:
            layer, rows, reading = self._reading
            self._reading = None
            self._push(layer, rows, reading.wait(), step)

    def _push(self, layer: CacheLayer, rows: Sequence[int], scores: Sequence[float], step: PromptStep | None) -> None:
        cuts: dict[int, list[int]] = {}
        for row, score in zip(rows, scores, strict=True):
            if self.is_decided[row] or (step is not None and row not in step.decides):
                continue
            self.scores[row][layer.index] = score
            victim = self._selectors[row].push(layer.index, self._policy.laziness(score))
            if victim is not None:
                cuts.setdefault(victim, []).append(row)
        for victim, cut_rows in cuts.items():
            self._cut(self._cache.attention_layers[victim], cut_rows, step)

    def _cut(self, layer: CacheLayer, rows: Sequence[int], step: PromptStep | None) -> None:
        if step is not None and layer.appended:
            layer.cut(rows, step.totals, step.total(layer.pool.device))
        else:  # before the step's tokens, or outside of a prompt
            layer.cut(rows, self._cache.lengths, layer.clock.seq_len)

    # All layers at once.

    def after_chunks(self, lengths_before: Sequence[int]) -> None:
        """A prompt that came in chunks is complete; before it the rows had ``lengths_before`` tokens."""
        cache = self._cache
        rows = self.due(cache.lengths)
        n_queries = [
            min(cache.settings.n_last, length - before)
            for length, before in zip(cache.lengths, lengths_before, strict=True)
        ]
        for layer in cache.competing if rows else []:
            if self._fixed is not None:
                if layer.index not in self._fixed:
                    self._cut(layer, rows, None)
                continue
            signal = signal_from_cache(layer, cache.lengths, n_queries)
            self._push_all(layer, signal, rows)
        for row in rows:
            self.is_decided[row] = True
        self._prompt_lengths = list(cache.lengths)
        self._forget()

    def _push_all(self, layer: CacheLayer, signal: LayerSignal, rows: Sequence[int]) -> None:
        scores = reduce_over_ranks(self._policy.score(signal), self._policy.reduction, self._cache.process_group)
        values = scores.tolist()
        self._push(layer, rows, [values[row] for row in rows], None)

    # While decoding.

    def measures_next(self) -> bool:
        """Whether the next decode step is one of the last ``n_last`` before a deferred choice."""
        if self._policy.is_fixed or self._cache.records_past:
            return False
        first = self._limit + 1 - self._cache.settings.n_last
        return any(
            not decided and length >= first
            for decided, length in zip(self.is_decided, self._cache.lengths, strict=True)
        )

    def wake_at(self, row: int) -> int:
        """The length at which the row's next decode step needs the host: for a page, or for its choice."""
        cache, length = self._cache, self._cache.lengths[row]
        if cache.shares_pages:
            return length + 1
        wake = min(
            (layer.blocks.n_slots(row) for layer in cache.attention_layers if layer.can_fill(row)),
            default=length + 2**30,
        )
        if not self.is_decided[row]:
            first = self._limit + 1 - cache.settings.n_last
            wake = min(wake, first if length < first else length + 1)
        return wake

    def after_decode(self) -> None:
        """A decode step that was measured is done: the rows that have outgrown the window choose."""
        cache = self._cache
        rows = [row for row, length in enumerate(cache.lengths) if not self.is_decided[row] and length > self._limit]
        if not rows:
            return
        for layer in cache.competing:
            counts = [
                min(len(layer.decode_masses), length - before)
                for length, before in zip(cache.lengths, self._prompt_lengths, strict=True)
            ]
            if self._policy.needs_outputs:
                signal = signal_from_cache(layer, cache.lengths, counts)
            else:
                mass = torch.stack(layer.decode_masses, dim=2)  # [B, H_q, n, 2]
                real = torch.tensor(counts, dtype=torch.int32, device=mass.device)
                signal = LayerSignal(mass, real, layer.window)
            self._push_all(layer, signal, rows)
        for row in rows:
            self.is_decided[row] = True
        if not self.is_open:
            self._forget()

    def _forget(self) -> None:
        for layer in self._cache.competing:
            layer.last_queries, layer.decode_masses = None, []
