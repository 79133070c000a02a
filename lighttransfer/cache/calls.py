"""What calls are about: their tensors, their lengths and padding, and whether they end a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class PromptStep:
    """What the layers share in one call of several tokens.

    Attributes:
        n_tokens: columns of the chunk, padding included.
        starts: each row's first real token in the chunk, once its padding stands at the front.
        order: int64 ``[B, n_tokens]``, the columns in the order that brings the padding there; ``None``: it is there.
        lengths, totals: each row's real tokens before and after.
        decides: the rows whose layers are chosen in this call.
        keeps_queries: whether more of the prompt is to come, so that its last queries have to be remembered.
        is_draft: the tokens may be taken back; they are decode steps, not a prompt.
        measures: whether they may be among the last before a choice, so that each has to be measured.
    """

    n_tokens: int
    starts: list[int]
    lengths: list[int]
    order: Tensor | None = None
    decides: list[int] = field(default_factory=list)
    keeps_queries: bool = False
    is_draft: bool = False
    measures: bool = False
    _on_device: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    @property
    def totals(self) -> list[int]:
        return [n + self.n_tokens - start for n, start in zip(self.lengths, self.starts, strict=True)]

    @property
    def is_padded(self) -> bool:
        return any(self.starts)

    @property
    def is_first(self) -> bool:
        """No row has anything cached."""
        return not any(self.lengths)

    def _tensor(self, name: str, values: Sequence[int], device: torch.device) -> Tensor:
        key = (name, device)
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(values, dtype=torch.int32, device=device)
        return self._on_device[key]

    def seq_start(self, device: torch.device) -> Tensor | None:
        """int32 ``[B]`` for the ops; ``None``: no row is padded."""
        return self._tensor("starts", self.starts, device) if self.is_padded else None

    def total(self, device: torch.device) -> Tensor:
        """int32 ``[B]``: the tokens of each row after the call."""
        return self._tensor("totals", self.totals, device)

    def n_queries(self, n_last: int, rows: Sequence[int], device: torch.device) -> Tensor | None:
        """int32 ``[len(rows)]``: how many of the last ``n_last`` queries are real; ``None``: all."""
        if self.n_tokens >= n_last and not self.is_padded:
            return None
        counts = [min(n_last, self.n_tokens - self.starts[row]) for row in rows]
        return torch.tensor(counts, dtype=torch.int32, device=device)


@dataclass
class Keys:
    """The keys and values that some rows' queries attend to.

    ``k, v [B, S_k, H_kv, D]``, right-aligned: row ``b`` has real tokens from ``start[b]`` on (``None``: all are).
    """

    k: Tensor
    v: Tensor
    start: Tensor | None


@dataclass
class Call:
    """One layer's arguments: ``q [B, S, H_q, D]``, ``k, v [B, S, H_kv, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    sink_logit: Tensor | None  # [H_q], see apply_sink_logit

    def in_order(self, order: Tensor) -> Call:
        """The same with every row's columns in another order, ``[B, S]``."""
        row = torch.arange(order.shape[0], device=order.device)[:, None]
        return Call(self.q[row, order], self.k[row, order], self.v[row, order], self.scale, self.sink_logit)

    def rows(self, rows: Sequence[int]) -> Call:
        """The same for some rows."""
        if len(rows) == self.q.shape[0]:
            return self
        index = torch.tensor(rows, device=self.q.device)
        return Call(self.q[index], self.k[index], self.v[index], self.scale, self.sink_logit)


class OpenPrefill:
    """A prompt that comes in chunks.

    Attributes:
        length: its columns, if known.
        columns: columns seen before it.
        lengths: each row's tokens before it; empty before the first call of all.
    """

    def __init__(self, length: int | None, columns: int, lengths: list[int]) -> None:
        self.length = length
        self.columns = columns
        self.lengths = lengths
