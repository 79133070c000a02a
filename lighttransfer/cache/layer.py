"""One layer of the cache: its pages, and its attention over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .. import ops
from ..paging.block_table import BlockTable
from ..paging.pool import KVPool
from ..window import RetainedWindow
from .calls import Call, Keys, PromptStep
from .clock import Clock, write_ints
from .last_queries import LastQueries, MeasuredSteps
from .part import CachePart
from .sink_logit import apply_sink_logit, sink_logit_mass
from .undo import Undo, token_undo

if TYPE_CHECKING:
    from .paged_cache import PagedCache


_streaming_decode: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.lighttransfer.streaming_decode.default


class CacheLayer(CachePart, CacheLayerMixin):
    """What one attention layer caches, for every row of the batch.

    Attributes:
        index: the layer's number in the model.
        competes: a full-attention layer, which may be cut to ``window``. Otherwise a native sliding-window layer, whose
            ring of ``window`` it has from the start.
        recent: for each row the ring's ``n_recent``; 0: the row is full. ``n_recent`` is the same on the device.
        blocks: its pages.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int, window: RetainedWindow, *, competes: bool) -> None:
        CacheLayerMixin.__init__(self)
        CachePart.__init__(self, cache)
        self.index = index
        self.window = window
        self.competes = competes
        self.is_sliding = not competes
        self.n_sink = window.n_sink
        self.recent: list[int] = []
        self.n_recent: Tensor
        self.pool: KVPool
        self.clock: Clock
        self.blocks: BlockTable
        self.appended = True  # whether the keys of the step lie in the pool
        self.attended = False  # whether the step is done here
        self.query_shape: tuple[int, int] = (0, 0)  # H_q and D of the prompt's queries
        self.last_queries: LastQueries | None = None  # of a prompt in chunks, of decode steps
        self.record_past = False  # transformers' flag: calls can be taken back until the next crop
        self.undo: list[Undo | None] = []  # of the calls since
        self.decode_masses: list[Tensor] = []  # [B, H_q, 2] of the latest decode steps in a row, before a choice
        self.measured: MeasuredSteps | None = None  # those since the host last looked

    def __repr__(self) -> str:
        return f"CacheLayer(index={self.index}, {'full' if self.competes else 'sliding'} attention)"

    # What transformers asks of a layer. The cache answers for all layers alike.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the layer ready for a batch like ``key_states [B, H_kv, S, D]``."""
        n_rows = key_states.shape[0]
        self.pool = self.cache.pool_for(key_states)
        self.clock = self.cache.clock_for(key_states.device, n_rows)
        self.blocks = BlockTable(self.pool, n_rows)
        with torch.inference_mode(False):
            self.n_recent = torch.empty(n_rows, dtype=torch.int32, device=self.pool.device)
        self.set_recent([0 if self.competes else self.window.n_recent] * n_rows)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.update(key_states, value_states, self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, self.index)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length(self.index)

    def get_max_length(self) -> int:
        return -1

    # Pages.

    def set_recent(self, recent: Sequence[int]) -> None:
        """Says for each row whether it is full (0) or a ring of so many recent tokens."""
        self.recent = list(recent)
        self.n_recent = write_ints(self.n_recent, recent)

    def n_slots(self, row: int, length: int) -> int:
        """Slots that ``length`` tokens of the row need."""
        return length if self.recent[row] == 0 else self.window.n_slots(length)

    def resize(self, lengths: Sequence[int]) -> None:
        """Gives every row exactly the pages that its ``lengths[row]`` tokens need, and those that are reserved."""
        for row, length in enumerate(lengths):
            self._resize(row, max(length, self.cache.decoding.reserved[row]))

    def _resize(self, row: int, length: int) -> None:
        change = self.blocks.resize(row, self.n_slots(row, length))
        if change:
            self.cache.account(row, change * self.pool.page_bytes)

    def n_missing(self, lengths: Sequence[int]) -> int:
        """Pages that rows of ``lengths`` tokens need beyond those that they have."""
        return sum(
            max(0, self.pool.pages_for(self.n_slots(row, length)) - len(self.blocks.pages[row]))
            for row, length in enumerate(lengths)
        )

    def cut(self, rows: Sequence[int], lengths: Sequence[int], seq_len: Tensor) -> None:
        """Turns full rows into rings and gives the pages that this frees back at once.

        ``lengths`` are the tokens of each row that lie in the pool now; ``seq_len`` is the same on the device.
        """
        moved = [row for row in rows if not self.window.keeps_all(lengths[row])]
        if moved:
            for row in moved:
                self.blocks.own(row, 0, self.window.size)
            ops.compact_kv_(
                self.pool.k,
                self.pool.v,
                seq_len,
                n_sink=self.n_sink,
                n_recent=self.window.n_recent,
                block_table=self.blocks.flush(),
                rows=torch.tensor(moved, dtype=torch.int32, device=self.pool.device),
            )
        self.set_recent([self.window.n_recent if row in rows else n for row, n in enumerate(self.recent)])
        if moved:
            self.resize(lengths)
            self.blocks.flush()

    def append(self, k: Tensor, v: Tensor, step: PromptStep) -> None:
        """Writes a chunk's ``k, v [B, S, H_kv, D]``."""
        self.resize(step.totals)
        if self.cache.shares_pages:
            for row, (begin, end) in enumerate(zip(step.lengths, step.totals, strict=True)):
                ring = self.recent[row] > 0
                self.blocks.own(row, 0 if ring else begin, self.n_slots(row, end))
        ops.append_kv_(
            self.pool.k,
            self.pool.v,
            k,
            v,
            self.clock.seq_len,
            n_sink=self.n_sink,
            n_recent=self.n_recent,
            block_table=self.blocks.flush(),
            seq_start=step.seq_start(self.pool.device),
        )
        self.appended = True

    def gather(self, rows: Sequence[int], lengths: Sequence[int]) -> Keys:
        """The cached keys of ``rows`` in position order; ``lengths``: the tokens of every row that lie in the pool."""
        seq_len, n_recent, table = self.clock.seq_len, self.n_recent, self.blocks.flush()
        if len(rows) < len(lengths):
            index = torch.tensor(rows, device=seq_len.device)
            seq_len, n_recent, table = seq_len[index], n_recent[index], table[index]
        k, v, start = ops.gather_kv(
            self.pool.k,
            self.pool.v,
            seq_len,
            n_sink=self.n_sink,
            n_recent=n_recent,
            max_len=max(self.n_slots(row, lengths[row]) for row in rows),
            block_table=table,
        )
        return Keys(k, v, start)

    def prepare_decode(self, row: int, length: int) -> None:
        """A page for the row's next token, and one that no other row reads."""
        self._resize(row, max(length + 1, self.cache.decoding.reserved[row]))
        if self.cache.shares_pages:
            slot = length if self.recent[row] == 0 else self.window.slot(length)
            self.blocks.own(row, slot, slot + 1)

    def can_fill(self, row: int) -> bool:
        """Whether the row will need more pages as it grows: it is full, or a ring that is not complete."""
        return self.recent[row] == 0 or self.blocks.n_slots(row) < self.window.size

    def select(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes row ``rows[i]``."""
        if not self.is_initialized:
            return
        self.blocks.select(rows)
        self.blocks.flush()
        self.set_recent([self.recent[row] for row in rows])
        self.decode_masses = [mass[list(rows)] for mass in self.decode_masses]
        if self.last_queries is not None:
            self.last_queries = self.last_queries.select(rows)

    def clear(self) -> None:
        """Forgets everything."""
        if self.is_initialized:
            self.blocks.release()
            del self.pool, self.clock, self.blocks, self.n_recent  # the pool's storage must not outlive its tokens
        self.is_initialized, self.recent = False, []
        self.undo, self.measured = [], None
        self.forget_steps()

    def decode(self, call: Call) -> Tensor:
        """One new token per row, written and attended to: ``[B, 1, H_q, D]``."""
        cache = self.cache
        if self.record_past:
            self.undo[-1] = token_undo(self, cache.lengths)
        mass_n_recent = cache.decoding.mass_n_recent if self.competes else -1
        out, lse, mass = _streaming_decode(
            call.q,
            call.k,
            call.v,
            self.pool.k,
            self.pool.v,
            self.clock.seq_len,
            n_sink=self.n_sink,
            n_recent=self.n_recent,
            mass_n_recent=mass_n_recent,
            block_table=self.blocks.tensor,
            scale=call.scale,
        )
        if call.sink_logit is not None:
            out, weight = apply_sink_logit(out, lse, call.sink_logit)
            if mass_n_recent >= 0:
                mass = sink_logit_mass(mass[:, :, None], weight)[:, :, 0]
        if mass_n_recent >= 0:
            last = LastQueries.of(call, out, lse, slice(None))
            if self.record_past:
                self.remember(mass, last)
            else:
                assert self.measured is not None
                self.measured.write(self.clock.place, mass, last)
        return out

    # What a choice between decode steps will rest on.

    def begin_measuring(self) -> None:
        """The next step is the first that :attr:`measured` keeps."""
        settings = self.cache.settings
        shape = (len(self.recent), *self.query_shape)
        if self.measured is None or self.measured.shape != shape:
            self.measured = MeasuredSteps(
                settings.n_last,
                shape,
                self.pool.dtype,
                self.pool.device,
                with_outputs=settings.policy.needs_outputs,
            )

    def collect(self, n_steps: int) -> None:
        """Remembers what :attr:`measured` has kept of ``n_steps`` steps."""
        assert self.measured is not None
        self.decode_masses += self.measured.masses(n_steps).unbind(2)
        last = self.measured.queries(n_steps)
        if last is not None:
            self.last_queries = last if self.last_queries is None else self.last_queries.then(last)
        self.forget_last(0)

    def tensors(self) -> list[Tensor]:
        """What a captured decode step uses, the pool and the clock aside."""
        return [self.blocks.tensor, self.n_recent, *([] if self.measured is None else self.measured.tensors())]

    def remember(self, mass: Tensor, last: LastQueries) -> None:
        """Keeps what a choice between decode steps will rest on: one more token's ``mass [B, H_q, 2]``."""
        settings = self.cache.settings
        self.decode_masses.append(mass)
        if settings.policy.needs_outputs:
            self.last_queries = last if self.last_queries is None else self.last_queries.then(last)
        if not self.record_past:  # else drafts that are taken back would have pushed out what came before them
            self.forget_last(0)

    def forget_last(self, n_tokens: int) -> None:
        """Forgets the last ``n_tokens`` tokens' part in the choice to come; keeps the latest ``n_last`` of the rest."""
        n_last = self.cache.settings.n_last
        self.decode_masses = self.decode_masses[: max(0, len(self.decode_masses) - n_tokens)][-n_last:]
        if self.last_queries is not None:
            self.last_queries = self.last_queries.without_last(n_tokens, n_last)

    def forget_steps(self) -> None:
        """Forgets all that a choice could rest on."""
        self.last_queries, self.decode_masses = None, []
