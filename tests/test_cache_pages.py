"""The cache's pages under any sequence of calls, cuts, forks and crops, against Python lists of every row's tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import ring_oracle
import tiny_models
import torch
from hybrid_runs import assert_books
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from lighttransfer.cache import LightTransferCache
from lighttransfer.cache.calls import Call

HEADS, KV_HEADS, DIM = 4, 2, 8
N_SINK, N_RECENT, PAGE = 2, 5, 4
#: Two layers that may be cut and one whose native window of six is a ring from the start.
KINDS = ["full_attention", "full_attention", "sliding_attention"]
NATIVE = 6
MAX_ROWS, MAX_TOKENS = 5, 60

lengths_of_a_chunk = st.lists(st.integers(0, 13), min_size=MAX_ROWS, max_size=MAX_ROWS)


@dataclass
class Tokens:
    """One row of one layer: every token it has seen, and whether only a window of them is kept."""

    ring: tuple[int, int] | None  # (n_sink, n_recent)
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # k, v [H_kv, D]

    def copy(self) -> Tokens:
        return Tokens(self.ring, list(self.seen))

    def slots(self) -> list[tuple[Tensor, Tensor]]:
        """What its slots must hold."""
        n_sink, n_recent = self.ring or (0, None)
        row = ring_oracle.Row(n_sink, n_recent)
        for k, v in self.seen:
            row.append(k, v)
        return [(k, v) for _, k, v in row.slots]

    def attend(self, q: Tensor, t: int) -> Tensor:
        """The output ``[H_q, D]`` of a query at position ``t``, in float64."""
        visible = [
            j for j in range(t + 1) if self.ring is None or j < self.ring[0] or j > t - self.ring[1]
        ]  # fmt: skip
        k, v = (torch.stack([self.seen[j][side] for j in visible], 1).double() for side in (0, 1))  # [H_kv, n, D]
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        weights = torch.softmax((k @ q.double()[:, :, None])[..., 0] * DIM**-0.5, -1)
        return (weights[:, None] @ v)[:, 0]


class Pages(RuleBasedStateMachine):
    """Every way in which a cache's pages are taken, written, shared, copied and given back, through its own calls."""

    @initialize(n_rows=st.integers(1, 3), lengths=lengths_of_a_chunk)
    def start(self, n_rows: int, lengths: list[int]) -> None:
        config = tiny_models.qwen2(
            num_hidden_layers=len(KINDS), layer_types=KINDS, use_sliding_window=True, sliding_window=NATIVE
        )
        # With every layer full nothing is chosen: the cuts are the machine's.
        window = {"n_sink": N_SINK, "n_recent": N_RECENT}
        self.cache = LightTransferCache(config, full_layers=1.0, page_size=PAGE, **window)
        self.generator = torch.Generator().manual_seed(0)
        self.begin(n_rows, lengths)

    def begin(self, n_rows: int, lengths: list[int]) -> None:
        self.rows = [[Tokens(None if i < 2 else (0, NATIVE)) for i in range(len(KINDS))] for _ in range(n_rows)]
        self.mask = torch.zeros(n_rows, 0, dtype=torch.bool)
        self.recorded: int | None = None  # tokens of every row since calls are recorded
        self.call([1 + length for length in lengths[:n_rows]])

    def call(self, lengths: list[int]) -> None:
        """Row ``b`` gets ``lengths[b]`` tokens, left-padded to the longest."""
        n_rows, n_tokens = len(self.rows), max(lengths)
        starts = [n_tokens - length for length in lengths]
        chunk = torch.arange(n_tokens)[None] >= torch.tensor(starts)[:, None]
        self.mask = torch.cat([self.mask, chunk], 1)
        for i, layer in enumerate(self.cache.attention_layers):
            q = torch.randn(n_rows, HEADS, n_tokens, DIM, generator=self.generator)
            k, v = torch.randn(2, n_rows, KV_HEADS, n_tokens, DIM, generator=self.generator)
            keys, values = self.cache.update(k, v, i)
            call = Call(*(x.transpose(1, 2) for x in (q, keys, values)), scale=None, sink_logit=None)
            out = self.cache.attend(layer, call, self.mask if any(starts) else None)  # [B, S, H_q, D]
            for row, start in enumerate(starts):
                tokens = self.rows[row][i]
                for at in range(start, n_tokens):
                    tokens.seen.append((k[row, :, at], v[row, :, at]))
                    expected = tokens.attend(q[row, :, at], len(tokens.seen) - 1)
                    torch.testing.assert_close(out[row, at].double(), expected, rtol=1e-5, atol=1e-5)
        if self.recorded is not None and any(starts):
            self.recorded = 0  # a padded call cannot be taken back
        elif self.recorded is not None:
            self.recorded += n_tokens

    @property
    def length(self) -> int:
        return max(len(row[0].seen) for row in self.rows)

    @precondition(lambda self: self.length < MAX_TOKENS)
    @rule(lengths=lengths_of_a_chunk)
    def append(self, lengths: list[int]) -> None:
        lengths = lengths[: len(self.rows)]
        self.call([1] * len(lengths) if max(lengths) < 2 else lengths)

    @precondition(lambda self: self.length < MAX_TOKENS)
    @rule(n_steps=st.integers(1, 6))
    def decode(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.call([1] * len(self.rows))

    @precondition(lambda self: self.recorded is None)
    @rule(layer=st.integers(0, 1), rows=st.sets(st.integers(0, MAX_ROWS - 1), min_size=1))
    def compact(self, layer: int, rows: set[int]) -> None:
        cut = [row for row in sorted(rows) if row < len(self.rows) and self.rows[row][layer].ring is None]
        if cut:
            where = self.cache.attention_layers[layer]
            where.cut(cut, self.cache.lengths, where.clock.seq_len)
        for row in cut:
            self.rows[row][layer].ring = (N_SINK, N_RECENT)

    @rule(choice=st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=MAX_ROWS))
    def fork(self, choice: list[int]) -> None:
        source = [row % len(self.rows) for row in choice]
        if len(source) == len(self.rows):
            self.cache.reorder_cache(torch.tensor(source))
        else:
            self.cache.batch_select_indices(torch.tensor(source))
        self.follow(source)

    @precondition(lambda self: 2 * len(self.rows) <= MAX_ROWS)
    @rule()
    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.follow([row for row in range(len(self.rows)) for _ in range(2)])

    def follow(self, source: list[int]) -> None:
        if source != list(range(len(self.rows))) and self.recorded is not None:
            self.recorded = 0  # what was recorded was of other rows
        self.rows = [[tokens.copy() for tokens in self.rows[row]] for row in source]
        self.mask = self.mask[source]

    @precondition(lambda self: self.length < MAX_TOKENS)
    @rule(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), anew=st.booleans())
    def draft(self, lengths: list[int], anew: bool) -> None:
        """Calls that can be taken back."""
        if anew or self.recorded is None:
            self.cache.activate_past_recording()
            self.recorded = 0
        for length in lengths:
            self.call([length] * len(self.rows))

    @precondition(lambda self: self.recorded is not None)
    @rule()
    def accept(self) -> None:
        self.cache.stop_recording()
        self.recorded = None

    @rule(n_tokens=st.one_of(st.integers(0, 8), st.integers(0, MAX_TOKENS)))
    def crop(self, n_tokens: int) -> None:
        """As far back as calls are recorded; else only where no ring has dropped anything, or down to the sinks."""
        all_tokens = [tokens for row in self.rows for tokens in row]
        shortest = min(len(tokens.seen) for tokens in all_tokens)
        unpadded = int(self.mask.all(0).flip(0).long().cumprod(0).sum())
        n_tokens = min(n_tokens, unpadded, shortest - 1)
        lost = any(
            tokens.ring and len(tokens.seen) > sum(tokens.ring) and len(tokens.seen) - n_tokens > tokens.ring[0]
            for tokens in all_tokens
        )
        if lost and n_tokens > (self.recorded or 0):
            with pytest.raises(ValueError, match="ring has wrapped"):
                self.cache.crop(-n_tokens)
            return
        self.cache.crop(-n_tokens)
        if n_tokens:
            self.mask = self.mask[:, :-n_tokens]
            for tokens in all_tokens:
                del tokens.seen[-n_tokens:]
        self.recorded = None if self.recorded is None else 0

    @rule(n_rows=st.integers(1, 3), lengths=lengths_of_a_chunk)
    def free(self, n_rows: int, lengths: list[int]) -> None:
        """The request is over; another one takes the cache."""
        (pool,) = self.cache.pools.values()
        self.cache.stop_recording()
        self.cache.reset()
        assert (pool.n_used, pool.n_free) == (0, pool.n_pages)
        self.begin(n_rows, lengths)

    @invariant()
    def every_row_holds_its_own_tokens(self) -> None:
        """Bit for bit, in the slots of its own block table."""
        for i, layer in enumerate(self.cache.attention_layers):
            table = layer.blocks.flush()
            for row, tokens in enumerate(layer_rows := [each[i] for each in self.rows]):
                slots = tokens.slots()
                pages = table[row, : -(-len(slots) // PAGE)].long()
                for side, pool in enumerate((layer.pool.k, layer.pool.v)):
                    held = pool[pages].flatten(0, 1)[: len(slots)]
                    assert torch.equal(held, torch.stack([slot[side] for slot in slots])), (i, row, side)
            assert len(layer.recent) == len(layer_rows)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        assert_books(self.cache)
        (pool,) = self.cache.pools.values()
        for row, request in enumerate(self.cache.report().requests):
            n_pages = sum(-(-len(tokens.slots()) // PAGE) for tokens in self.rows[row])
            assert request.bytes_held == n_pages * pool.page_bytes
            assert request.length == len(self.rows[row][0].seen)
            cut = [i for i, tokens in enumerate(self.rows[row]) if tokens.ring and i < 2]
            assert request.streaming_layers == cut


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, report_multiple_bugs=False)
