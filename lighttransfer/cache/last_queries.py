"""What a choice of layers rests on: the last queries of a prompt, the latest decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import Call
from .padding import over_padding


@dataclass
class LastQueries:
    """The last queries of a prompt or of decode steps, with what attention over all their keys made of them."""

    q: Tensor  # [B, n, H_q, D]
    out: Tensor  # [B, n, H_q, D]
    lse: Tensor  # [B, H_q, n], over the keys alone
    scale: float | None
    sink_logit: Tensor | None

    @classmethod
    def of(cls, call: Call, out: Tensor, lse: Tensor, columns: slice) -> LastQueries:
        """Some columns of a call, ``out`` and ``lse`` being its attention."""
        return cls(call.q[:, columns], out[:, columns], lse[:, :, columns], call.scale, call.sink_logit)

    def then(self, later: LastQueries, n_padding: Tensor | None = None) -> LastQueries:
        """These queries and later ones, without the first ``n_padding`` int64 ``[B]`` of those, which are no tokens.

        Every row keeps its width: what is missing behind is filled up in front with queries that mean nothing.
        """
        q, out = torch.cat((self.q, later.q), dim=1), torch.cat((self.out, later.out), dim=1)
        lse = torch.cat((self.lse, later.lse), dim=2)
        if n_padding is not None:
            index = over_padding(self.q.shape[1], q.shape[1], n_padding)  # [B, n]
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
