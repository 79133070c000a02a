"""Choices that rest on decode steps: one that a short prompt has put off, and those that memory asks for later.

A step that may turn out to be one of the last before a choice also measures what a cut would have kept of it. While
drafts are verified a step is a token that was accepted: what is taken back leaves no measure behind, and a choice waits
until it is known which tokens stay.
"""

from __future__ import annotations

import torch

from ..selection import LayerSignal
from .budget import full_layers, longest_within
from .prompt_choice import LayerChoice
from .signals import signal_from_cache


class DecodeChoice(LayerChoice):
    """The choices of a cache's rows, at the end of prompts and between decode steps."""

    def due_at(self, row: int) -> int | None:
        """The length at which decode steps next make the row choose; ``None``: as things stand, never."""
        settings = self.cache.settings
        if self.fixed is not None:
            return None
        if not self.is_decided[row]:
            return self.limit + 1
        every = settings.reselect_every
        if every is None or not full_layers(self.cache, row):
            return None
        assert settings.reselect_bytes is not None
        # The first look after which the row would outgrow its bytes before the next one.
        longest = longest_within(self.cache, row, settings.reselect_bytes)
        first = self._chosen_at[row] + every
        late = max(0, longest - every + 1 - first)
        return first + -(-late // every) * every

    @property
    def is_due(self) -> bool:
        """Whether decode steps have made some row choose, or look whether it has to."""
        dues = zip(self.cache.lengths, map(self.due_at, range(len(self.cache.lengths))), strict=True)
        return any(due is not None and length >= due for length, due in dues)

    def measures(self, n_tokens: int) -> bool:
        """Whether a call of ``n_tokens`` may bring one of the last ``n_last`` tokens before a choice."""
        n_last = self.cache.settings.n_last
        finished = self.cache.finished
        lengths = ((row, length) for row, length in enumerate(self.cache.lengths) if row not in finished)
        ends = ((length + n_tokens, self.due_at(row)) for row, length in lengths)
        return any(due is not None and end > due - n_last for end, due in ends)

    def wake_at(self, row: int) -> int:
        """The length at which the row's next decode step needs the host: for a page, or for its choice."""
        cache, length = self.cache, self.cache.lengths[row]
        if cache.shares_pages:
            return length + 1
        wake = min(
            (layer.blocks.n_slots(row) for layer in cache.attention_layers if layer.can_fill(row)),
            default=length + 2**30,
        )
        due = self.due_at(row)
        if due is not None:
            first = due - cache.settings.n_last
            wake = min(wake, first if length < first else length + 1)
        return wake

    def after_decode(self) -> bool:
        """Decode steps that may have been measured are done: the rows that are due choose. Returns whether some did."""
        cache = self.cache
        if not any(layer.decode_masses for layer in cache.competing):
            return False
        rows = []
        for row, length in enumerate(cache.lengths):
            due = self.due_at(row)
            if due is not None and length >= due:
                self._chosen_at[row] = length
                if not self.is_decided[row] or self._reselect(row, length):
                    rows.append(row)
        for layer in cache.competing if rows else []:
            if not any(layer.recent[row] == 0 for row in rows):
                continue
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
        return bool(rows)
