"""Which layers each request of a batch keeps, as the end of a prompt decides it; ``decode_choice.py`` has the rest."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..selection import LayerSelector, LayerSignal, reduce_over_ranks
from .budget import full_layers, n_affordable
from .part import CachePart
from .signals import signal_from_cache

if TYPE_CHECKING:
    from .calls import PromptStep
    from .layer import CacheLayer
    from .paged_cache import PagedCache


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


class LayerChoice(CachePart):
    """The choices of a cache's rows.

    A row is *open* until its layers are chosen; all its layers are full until then. Rows choose for themselves: what a
    row decides depends on its own tokens alone.

    Attributes:
        n_full: layers that a row keeps whole.
        fixed: the full layers of a fixed policy; ``None``: layers are scored.
        limit: tokens beyond which a row chooses that has not chosen at its prompt.
        is_decided: for each row whether it has chosen.
        scores: for each row the score of each layer that was looked at.
    """

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache)
        self._policy = cache.settings.policy
        self._indices = [layer.index for layer in cache.competing]
        self.n_full = cache.settings.n_full(len(self._indices))
        self.fixed = self._policy.full_layers(self._indices, self.n_full) if self._policy.is_fixed else None
        self.limit = int(cache.settings.defer_windows * cache.settings.window.size)
        self._reading: tuple[CacheLayer, Sequence[int], Reading] | None = None
        self.begin(0)

    def begin(self, n_rows: int) -> None:
        """Nothing is chosen for ``n_rows`` rows; with every layer full there is nothing to choose."""
        self.is_decided = [self.n_full >= len(self._indices)] * n_rows
        self.scores: list[dict[int, float]] = [{} for _ in range(n_rows)]
        self._selectors = [LayerSelector(self.n_full) for _ in range(n_rows)]
        self._prompt_lengths = [0] * n_rows  # tokens up to the end of the latest prompt
        self._chosen_at = [0] * n_rows  # tokens when the row last chose, or was last asked to

    def select(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes row ``rows[i]``."""
        self.is_decided = [self.is_decided[row] for row in rows]
        self.scores = [dict(self.scores[row]) for row in rows]
        self._selectors = [copy.deepcopy(self._selectors[row]) for row in rows]
        self._prompt_lengths = [self._prompt_lengths[row] for row in rows]
        self._chosen_at = [self._chosen_at[row] for row in rows]

    @property
    def is_open(self) -> bool:
        """Whether a later prompt may choose layers."""
        return self._reselects_turns or not all(self.is_decided)

    @property
    def _reselects_turns(self) -> bool:
        return self.cache.settings.reselect_turns and self.fixed is None

    def start(self, before: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """The rows that choose at the end of a prompt that takes them from ``before`` to ``lengths`` tokens.

        Their heaps are ready for the layers.
        """
        rows = []
        for row, (begin, length) in enumerate(zip(before, lengths, strict=True)):
            if not self.is_decided[row]:
                is_due = self.fixed is not None or length > max(begin, self.cache.settings.window.size)
            else:
                is_due = self._reselects_turns and 0 < begin < length and self._reselect(row, length)
            if is_due:
                rows.append(row)
        return rows

    def _reselect(self, row: int, length: int) -> bool:
        """Whether memory asks the row at ``length`` tokens to cut full layers; its heap then has as many as fit."""
        settings = self.cache.settings
        assert settings.reselect_bytes is not None
        ahead = settings.reselect_every or 0  # it has to fit until the next look
        n_keep = n_affordable(self.cache, row, length + ahead, settings.reselect_bytes)
        asks = n_keep < len(full_layers(self.cache, row))
        if asks:
            self._selectors[row] = LayerSelector(n_keep)
        return asks

    # At a prompt's end, layer by layer.

    def take_fixed(self, layer: CacheLayer, step: PromptStep) -> None:
        """A fixed policy's layer: its rows' keys go where they belong from the start."""
        assert self.fixed is not None
        if layer.index not in self.fixed:
            self._cut(layer, step.decides, step)

    def take(self, layer: CacheLayer, signal: LayerSignal, rows: Sequence[int], step: PromptStep) -> None:
        """Scores a layer; the heaps of the rows that decide cut what they hold too many.

        ``rows`` are the signal's rows. On CUDA the score is used when the next layer comes, so that none waits for it.
        """
        scores = self._score(signal)
        self._settle_reading(step)
        if reads_late(scores):
            self._reading = (layer, rows, Reading(scores))
        else:
            self._push(layer, rows, scores.tolist(), step)

    def _score(self, signal: LayerSignal) -> Tensor:
        return reduce_over_ranks(self._policy.score(signal), self._policy.reduction, self.cache.process_group)

    def settle(self, step: PromptStep) -> None:
        """The last layer of a prompt has come."""
        self._settle_reading(step)
        for row in step.decides:
            self.is_decided[row] = True
        self._note_prompt(step.totals)
        if not step.keeps_queries:
            self.forget()

    def _note_prompt(self, lengths: Sequence[int]) -> None:
        self._prompt_lengths, self._chosen_at = list(lengths), list(lengths)

    def _settle_reading(self, step: PromptStep | None) -> None:
        if self._reading is not None:
            layer, rows, reading = self._reading
            self._reading = None
            self._push(layer, rows, reading.wait(), step)

    def _push(self, layer: CacheLayer, rows: Sequence[int], scores: Sequence[float], step: PromptStep | None) -> None:
        cuts: dict[int, list[int]] = {}
        for row, score in zip(rows, scores, strict=True):
            if step is not None and row not in step.decides:
                continue
            self.scores[row][layer.index] = score
            victim = self._selectors[row].push(layer.index, self._policy.laziness(score))
            if victim is not None:
                cuts.setdefault(victim, []).append(row)
        for victim, cut_rows in cuts.items():
            self._cut(self.cache.attention_layers[victim], cut_rows, step)

    def _cut(self, layer: CacheLayer, rows: Sequence[int], step: PromptStep | None) -> None:
        if step is not None and layer.appended:
            layer.cut(rows, step.totals, step.total(layer.pool.device))
        else:  # before the step's tokens, or outside of a prompt
            layer.cut(rows, self.cache.lengths, layer.clock.seq_len)

    # All layers at once.

    def after_chunks(self, lengths_before: Sequence[int]) -> None:
        """A prompt that came in chunks is complete; before it the rows had ``lengths_before`` tokens."""
        cache = self.cache
        rows = self.start(lengths_before, cache.lengths)
        n_queries = [
            min(cache.settings.n_last, length - before)
            for length, before in zip(cache.lengths, lengths_before, strict=True)
        ]
        for layer in cache.competing if rows else []:
            if self.fixed is not None:
                if layer.index not in self.fixed:
                    self._cut(layer, rows, None)
            elif any(layer.recent[row] == 0 for row in rows):
                self._push_all(layer, signal_from_cache(layer, cache.lengths, n_queries), rows)
        for row in rows:
            self.is_decided[row] = True
        self._note_prompt(cache.lengths)
        self.forget()

    def _push_all(self, layer: CacheLayer, signal: LayerSignal, rows: Sequence[int]) -> None:
        values = self._score(signal).tolist()
        rows = [row for row in rows if layer.recent[row] == 0]
        self._push(layer, rows, [values[row] for row in rows], None)

    def forget(self) -> None:
        """Forgets what the last queries did: the next ones do not follow them, or nothing is to be chosen."""
        self.cache.decoding.forget()
        for layer in self.cache.competing:
            layer.forget_steps()
