"""What decode steps count on the device: tensors that change in place, because no graph may freeze them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Clock:
    """What decode steps count on one device. The tensors change in place, so that a captured step reads the new values.

    Attributes:
        seq_len: int32 ``[B]``, tokens that each row has seen; read by every op of every layer there.
        n_seen: int64 ``[]``, columns seen, padding included.
        place: int64 ``[1]``, where the next measured step goes in
            :class:`~lighttransfer.cache.last_queries.MeasuredSteps`.
    """

    def __init__(self, lengths: Sequence[int], n_seen: int, n_last: int, device: torch.device) -> None:
        self._n_last = n_last
        with torch.inference_mode(False):
            self.seq_len = torch.empty(len(lengths), dtype=torch.int32, device=device)
            self.n_seen = torch.empty((), dtype=torch.int64, device=device)
            self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.set(lengths, n_seen)

    def set(self, lengths: Sequence[int], n_seen: int) -> None:
        """Sets what the host knows."""
        self.seq_len = write_ints(self.seq_len, lengths)
        self.n_seen.fill_(n_seen)

    def restart(self) -> None:
        """The next measured step is the first."""
        self.place.zero_()

    def tick(self, *, measured: bool) -> None:
        """Counts one token in every row, without the host."""
        self.seq_len.add_(1)
        self.n_seen.add_(1)
        if measured:
            self.place.add_(1).remainder_(self._n_last)

    def tensors(self) -> list[Tensor]:
        """What a captured step uses."""
        return [self.seq_len, self.n_seen, self.place]


def write_ints(tensor: Tensor, values: Sequence[int]) -> Tensor:
    """``values`` in the int32 ``tensor``, in place where their number is the same, else in a new one."""
    with torch.inference_mode(False):
        new = torch.tensor(list(values), dtype=tensor.dtype, device=tensor.device)
        return tensor.copy_(new) if tensor.shape == new.shape else new
