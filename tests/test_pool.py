"""Pages: allocation, growth, sharing and accounting, and block tables over them against plain Python lists."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lighttransfer import KVPool, PoolFullError
from lighttransfer.paging.block_table import BlockTable


def make_pool(**changes: Any) -> KVPool:
    arguments = {"n_kv_heads": 2, "head_dim": 8, "dtype": torch.float32, "device": "cpu", "page_size": 4}
    return KVPool(**{**arguments, **changes})


def test_pages_are_reused_and_counted_in_storage_bytes() -> None:
    pool = make_pool(n_pages=3)
    assert pool.page_bytes == 2 * 4 * 2 * 8 * 4
    assert pool.storage_bytes == 3 * pool.page_bytes == 2 * pool.k.untyped_storage().nbytes()
    first = pool.allocate(2)
    pool.release(first)
    second = pool.allocate(3)
    assert set(first) < set(second) == {0, 1, 2}
    assert (pool.n_pages, pool.n_used, pool.n_free) == (3, 3, 0)
    assert pool.peak_bytes_in_use == 3 * pool.page_bytes == pool.peak_storage_bytes


def test_growth_keeps_pages_and_their_numbers() -> None:
    pool = make_pool(n_pages=2)
    pages = pool.allocate(2)
    for page in pages:
        pool.k[page], pool.v[page] = page + 1.0, -page - 1.0
    more = pool.allocate(5)
    assert not set(more) & set(pages)
    for page in pages:
        assert torch.equal(pool.k[page], torch.full((4, 2, 8), page + 1.0))
        assert torch.equal(pool.v[page], torch.full((4, 2, 8), -page - 1.0))
    assert pool.peak_storage_bytes > pool.storage_bytes


def test_growth_is_geometric() -> None:
    pool = make_pool(n_pages=100)
    sizes = set()
    for _ in range(400):
        pool.allocate(1)
        sizes.add(pool.n_pages)
    assert len(sizes) < 12
    assert pool.n_pages < 1.3 * 400


def test_reserve_is_exact() -> None:
    pool = make_pool()
    pool.allocate(3)
    pool.reserve(10)
    assert pool.n_pages == 13
    pool.reserve(10)
    assert pool.n_pages == 13


def test_a_full_pool_says_so_and_stays_as_it_is() -> None:
    pool = make_pool(n_pages=1, max_pages=4)
    pages = pool.allocate(3)
    before = (pool.n_pages, pool.n_used, pool.n_free, pool.k.data_ptr())
    with pytest.raises(PoolFullError, match=r"2 pages of 4 tokens asked for, 1 free of max_pages=4"):
        pool.allocate(2)
    with pytest.raises(PoolFullError):
        pool.reserve(2)
    assert (pool.n_pages, pool.n_used, pool.n_free, pool.k.data_ptr()) == before
    pool.release(pages)
    assert len(pool.allocate(4)) == 4


def test_shared_pages_live_until_their_last_owner_leaves() -> None:
    pool = make_pool(n_pages=2)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    assert (pool.owners(page), pool.n_used) == (1, 1)
    pool.release([page])
    assert (pool.owners(page), pool.n_used) == (0, 0)


def test_a_copy_takes_one_owner_along() -> None:
    pool = make_pool(n_pages=1)
    (page,) = pool.allocate(1)
    pool.k[page], pool.v[page] = 5.0, 6.0
    pool.share([page])
    copy = pool.copy(page)
    assert (pool.owners(page), pool.owners(copy)) == (1, 1)
    assert torch.equal(pool.k[copy], pool.k[page])
    assert torch.equal(pool.v[copy], pool.v[page])


@pytest.mark.parametrize("pages", [[1], [0, 0], [7], [-1]])
def test_only_owned_pages_are_released(pages: list[int]) -> None:
    pool = make_pool(n_pages=2)
    assert pool.allocate(1) == [0]
    with pytest.raises(ValueError, match="pages must be owned as often as they are released"):
        pool.release(pages)
    with pytest.raises(ValueError, match="pages must be owned"):
        pool.share([1])
    assert (pool.owners(0), pool.n_used, pool.n_free) == (1, 1, 1)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("page_size", 0, ValueError),
        ("n_pages", -1, ValueError),
        ("head_dim", 2.0, TypeError),
        ("n_kv_heads", 0, ValueError),
    ],
)
def test_bad_pools(argument: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=argument):
        make_pool(**{argument: value})


def test_a_pool_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        pool = make_pool(n_pages=1)
        table = BlockTable(pool, 1)
        table.resize(0, 4)
        table.flush()
    pool.k.zero_()
    table.tensor.add_(0)


class Tables(RuleBasedStateMachine):
    """Rows that grow, shrink, fork and write, over one pool; the model is a list of tokens for each row."""

    @initialize(n_rows=st.integers(1, 3))
    def start(self, n_rows: int) -> None:
        self.pool = make_pool(max_pages=40)
        self.table = BlockTable(self.pool, n_rows)
        self.rows: list[list[float]] = [[] for _ in range(n_rows)]
        self.clock = 0.0

    def _row(self, row: int) -> int:
        return row % len(self.rows)

    def _slot(self, row: int, slot: int) -> tuple[int, int]:
        table = self.table.flush()
        return int(table[row, slot // 4]), slot % 4

    @rule(row=st.integers(0, 5), count=st.integers(1, 9))
    def append(self, row: int, count: int) -> None:
        row = self._row(row)
        begin, end = len(self.rows[row]), len(self.rows[row]) + count
        try:
            self.table.resize(row, end)
            self.table.own(row, begin, end)
        except PoolFullError:
            self.table.resize(row, begin)
            return
        for slot in range(begin, end):
            self.clock += 1
            self.rows[row].append(self.clock)
            self.pool.k[self._slot(row, slot)] = self.clock

    @rule(row=st.integers(0, 5), slot=st.integers(0, 30))
    def overwrite(self, row: int, slot: int) -> None:
        row = self._row(row)
        if slot < len(self.rows[row]):
            try:
                self.table.own(row, slot, slot + 1)
            except PoolFullError:
                return
            self.clock += 1
            self.rows[row][slot] = self.clock
            self.pool.k[self._slot(row, slot)] = self.clock

    @rule(row=st.integers(0, 5), keep=st.integers(0, 20))
    def shrink(self, row: int, keep: int) -> None:
        row = self._row(row)
        del self.rows[row][keep:]
        self.table.resize(row, len(self.rows[row]))

    @precondition(lambda self: len(self.rows) < 6)
    @rule(choice=st.lists(st.integers(0, 5), min_size=1, max_size=5))
    def fork(self, choice: list[int]) -> None:
        rows = [self._row(row) for row in choice]
        self.table.select(rows)
        self.rows = [list(self.rows[row]) for row in rows]

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        for row, tokens in enumerate(self.rows):
            assert [float(self.pool.k[self._slot(row, slot)][0, 0]) for slot in range(len(tokens))] == tokens

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        owners = Counter(page for pages in self.table.pages for page in pages)
        assert all(self.pool.owners(page) == owners[page] for page in range(self.pool.n_pages))
        assert self.pool.n_used == len(owners)
        assert self.pool.n_used + self.pool.n_free == self.pool.n_pages
        assert self.pool.bytes_in_use == len(owners) * self.pool.page_bytes <= self.pool.storage_bytes

    def teardown(self) -> None:
        self.table.release()
        assert self.pool.n_used == 0


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
