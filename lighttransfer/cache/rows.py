"""A cache's rows: how many tokens each has, which of them have finished, and tokens that are taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache

from .undo import RecordedCall, lost_rows

if TYPE_CHECKING:
    from .clock import Clock
    from .decode_choice import DecodeChoice
    from .decoding import Decoding
    from .layer import CacheLayer

#: The length of a row that ops leave alone: so far below 0 that no number of decode steps makes it a length.
_INACTIVE = -(2**30)


class Rows(Cache):
    """The rows of a batch and their tokens.

    Attributes:
        lengths: each row's tokens, without padding.
        finished: the rows that decode steps leave alone until :meth:`resume_rows`.
        clocks: the lengths on the devices.
        recorded: the calls since recording began, or since the last crop.
    """

    attention_layers: list[CacheLayer]
    competing: list[CacheLayer]
    choice: DecodeChoice
    decoding: Decoding

    def _clear_rows(self) -> None:
        self.lengths: list[int] = []
        self.finished: frozenset[int] = frozenset()
        self.clocks: dict[torch.device, Clock] = {}
        self.recorded: list[RecordedCall] = []
        self._seen = 0  # columns seen: tokens, padding included
        self._real_from: list[int] = []  # for each row, from which column on all are real tokens
        self._skipped = False  # whether decode steps have left rows alone, whose columns are padding then

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        for clock in self.clocks.values():
            values = [_INACTIVE if row in self.finished else length for row, length in enumerate(lengths)]
            clock.set(values, self._seen)
        self.decoding.wake(lengths)

    def count_token(self) -> None:
        """The host notes a decode step."""
        self.lengths = [length + (row not in self.finished) for row, length in enumerate(self.lengths)]
        self._seen += 1

    # Rows that finish before others.

    def finish_rows(self, rows: Iterable[int]) -> None:
        """Decode steps leave these rows alone, too, until :meth:`resume_rows`: what they bring for them is padding.

        A later prompt's mask then has to say so: 0 in the columns of these steps.
        """
        finished = self.finished.union(rows)
        if finished != self.finished:
            self.finished, self._skipped = finished, True
            self._set_lengths(self.lengths)

    def resume_rows(self) -> None:
        """Every row goes on with the next call."""
        if self.finished:
            for row in self.finished:
                self._real_from[row] = self._seen
            self.finished = frozenset()
            self._set_lengths(self.lengths)

    # Taking tokens back.

    @property
    def records_past(self) -> bool:
        """Whether calls can be taken back until the next crop."""
        return any(layer.record_past for layer in self.attention_layers)

    def _forget_calls(self) -> None:
        self.recorded = []
        for layer in self.attention_layers:
            layer.undo = []

    def _shorten(self, n_tokens: Sequence[int]) -> None:
        """Counts ``n_tokens[row]`` tokens less; the rings hold what they need."""
        self._set_lengths([length - n for length, n in zip(self.lengths, n_tokens, strict=True)])
        for layer in self.attention_layers:
            layer.resize(self.lengths)
            layer.blocks.flush()

    def _drop_void(self, n_void: Sequence[int]) -> None:
        """The last ``n_void[row]`` tokens, which were read after a row had finished, turn out to be padding."""
        lost = lost_rows(self, n_void)
        if lost:
            raise ValueError(
                "attention_mask must keep the tokens that rings have replaced others with, got padding for the last "
                f"{[n_void[row] for row in lost]} cached tokens of rows {lost}, in which a streaming layer's ring has "
                "wrapped: what they overwrote is gone"
            )
        self._shorten(n_void)
        self._forget_calls()
        self.choice.forget()
        self._real_from = [self._seen if n else begin for begin, n in zip(self._real_from, n_void, strict=True)]

    def _accept_drafts(self, n_rejected: int) -> None:
        """All but the last ``n_rejected`` tokens stay: the rows that are due choose on these."""
        for layer in self.competing:
            layer.forget_last(n_rejected)
        if self.choice.after_decode():
            self._set_lengths(self.lengths)
