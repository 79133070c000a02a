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


@dataclass
class LastQueries:
    """The last queries of a prompt or of decode steps, with what attention over all their keys made of them."""

    q: Tensor  # [B, n, H_q, D]
    out: Tensor  # [B, n, H_q, D]
    lse: Tensor  # [B, H_q, n], over the keys alone
    scale: float | None
    sink_logit: Tensor | None

    def then(self, later: LastQueries, n_padding: Tensor | None = None) -> LastQueries:
        """These queries and later ones, without the first ``n_padding`` int64 ``[B]`` of those, which are no tokens.

        Every row keeps its width: what is missing behind is filled up in front with queries that mean nothing.
        """
        q, out = torch.cat((self.q, later.q), dim=1), torch.cat((self.out, later.out), dim=1)
        lse = torch.cat((self.lse, later.lse), dim=2)
        if n_padding is not None:
            index, shift = torch.arange(q.shape[1], device=q.device)[None], n_padding[:, None]
            index = torch.where(index < self.q.shape[1] + shift, (index - shift).clamp_min(0), index)  # [B, n]
            row = torch.arange(q.shape[0], device=q.device)[:, None]
            q, out, lse = q[row, index], out[row, index], lse.transpose(1, 2)[row, index].transpose(1, 2)
        return LastQueries(q, out, lse, later.scale, later.sink_logit)

    def without_last(self, n_tokens: int, n_last: int) -> LastQueries | None:
        """All but the last ``n_tokens``, of these the last ``n_last``; ``None``: nothing is left."""
        end = self.q.shape[1] - n_tokens
        if end <= 0:
            return None
        kept = slice(max(0, end - n_last), end)
        return LastQueries(self.q[:, kept], self.out[:, kept], self.lse[:, :, kept], self.scale, self.sink_logit)

    def select(self, rows: Sequence[int]) -> LastQueries:
        """Row ``i`` becomes row ``rows[i]``."""
        index = torch.tensor(rows, device=self.q.device)
        return LastQueries(self.q[index], self.out[index], self.lse[index], self.scale, self.sink_logit)


class MeasuredSteps:
    """One layer's latest ``n_last`` decode steps, as a deferred choice will need them.

    A ring on the device: a step is written where the clock says, so that writing needs no host and no new tensor.

    Args:
        n_last: steps to keep.
        shape: rows, query heads and head_dim.
        dtype, device: of queries and outputs.
        with_outputs: whether the policy needs more than the mass.
    """

    def __init__(
        self, n_last: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, with_outputs: bool
    ) -> None:
        self.shape = shape
        self._n_last = n_last
        with torch.inference_mode(False):
            self._mass = torch.zeros(n_last, *shape[:2], 2, dtype=torch.float32, device=device)  # [n_last, B, H_q, 2]
            self._last: LastQueries | None = None
            if with_outputs:
                q = torch.zeros(n_last, *shape, dtype=dtype, device=device)  # [n_last, B, H_q, D]
                lse = torch.zeros(n_last, *shape[:2], dtype=torch.float32, device=device)  # [n_last, B, H_q]
                self._last = LastQueries(q, torch.zeros_like(q), lse, None, None)

    def write(self, place: Tensor, mass: Tensor, step: LastQueries) -> None:
        """A step's ``mass [B, H_q, 2]`` and its one query of every row, at ``place``: int64 ``[1]``."""
        self._mass.index_copy_(0, place, mass[None])
        last = self._last
        if last is not None:
            last.q.index_copy_(0, place, step.q.transpose(0, 1))
            last.out.index_copy_(0, place, step.out.transpose(0, 1))
            last.lse.index_copy_(0, place, step.lse.permute(2, 0, 1))
            last.scale, last.sink_logit = step.scale, step.sink_logit

    def _order(self, n_steps: int) -> Tensor:
        """Where the last of ``n_steps`` steps lie, in their order."""
        steps = range(max(0, n_steps - self._n_last), n_steps)
        return torch.tensor([step % self._n_last for step in steps], device=self._mass.device)

    def masses(self, n_steps: int) -> Tensor:
        """fp32 ``[B, H_q, n, 2]`` of the last ``n = min(n_steps, n_last)`` of ``n_steps`` steps."""
        return self._mass[self._order(n_steps)].permute(1, 2, 0, 3).contiguous()

    def queries(self, n_steps: int) -> LastQueries | None:
        """Their queries and outputs, if these are kept."""
        last, order = self._last, self._order(n_steps)
        if last is None:
            return None
        return LastQueries(
            last.q[order].transpose(0, 1).contiguous(),
            last.out[order].transpose(0, 1).contiguous(),
            last.lse[order].permute(1, 2, 0).contiguous(),
            last.scale,
            last.sink_logit,
        )

    def tensors(self) -> list[Tensor]:
        """The rings."""
        return [self._mass, *([] if self._last is None else [self._last.q, self._last.out, self._last.lse])]


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
