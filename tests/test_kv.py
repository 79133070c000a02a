"""compact_kv_, append_kv_ and gather_kv against a list of (position, k, v); moves are exact to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_cases import DTYPES, chunk, full_rows, i32, n_recent_of
from ring_oracle import LAYOUTS, Row, bits, make_cache

from lighttransfer import _library
from lighttransfer.ops import append_kv_, compact_kv_, gather_kv

# ---- compact_kv_


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compact_moves_the_kept_tokens_to_their_slots(device, layout, dtype):
    n_sink, n_recent = 3, 7
    lengths = [29, 10, 11, 4, 0, 17, 18]  # beyond, at and just over the window, short, empty, whole turns
    cache = make_cache(layout, batch=7, capacity=30, heads=3, dim=24, dtype=dtype, device=device)
    rows = full_rows(cache, lengths, n_sink)
    before = cache.base.clone()
    compact_kv_(cache.k, cache.v, i32(lengths, device), n_sink=n_sink, n_recent=n_recent, block_table=cache.table)
    for row in rows:
        row.compact(n_recent)
    assert [token[0] for token in rows[0].slots[:3]] == [0, 1, 2]
    cache.expect(before, rows)


@pytest.mark.parametrize(("n_sink", "n_recent"), [(0, 1), (0, 5), (4, 1), (1, 8), (0, 64), (40, 3)])
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_compact_windows(device, layout, n_sink, n_recent):
    lengths = [41, 33, 6]
    cache = make_cache(layout, batch=3, capacity=41, heads=2, dim=8, dtype=torch.float16, device=device)
    rows = full_rows(cache, lengths, n_sink)
    before = cache.base.clone()
    compact_kv_(cache.k, cache.v, i32(lengths, device), n_sink=n_sink, n_recent=n_recent, block_table=cache.table)
    for row in rows:
        row.compact(n_recent)
    cache.expect(before, rows)


def test_compact_many_tasks(device):
    """Enough bytes for every thread to get some, with runs that cross pages and the wrap."""
    lengths = [1500, 900, 1023]
    cache = make_cache(
        "paged", batch=3, capacity=1504, heads=8, dim=64, dtype=torch.bfloat16, device=device, page_size=16
    )
    rows = full_rows(cache, lengths, 4)
    before = cache.base.clone()
    compact_kv_(cache.k, cache.v, i32(lengths, device), n_sink=4, n_recent=700, block_table=cache.table)
    for row in rows:
        row.compact(700)
    cache.expect(before, rows)


def test_compact_leaves_other_and_inactive_rows_alone(device):
    cache = make_cache("paged", batch=4, capacity=20, heads=2, dim=16, dtype=torch.float16, device=device)
    rows = full_rows(cache, [20, 20, 20, 20], 1)
    before = cache.base.clone()
    compact_kv_(
        cache.k,
        cache.v,
        i32([20, 20, -1, 20], device),
        n_sink=1,
        n_recent=4,
        block_table=cache.table,
        rows=i32([3, 2, 0], device),
    )
    rows[0].compact(4)
    rows[3].compact(4)
    cache.expect(before, rows)


def test_compact_needs_only_the_pages_it_touches(device):
    cache = make_cache("paged", batch=1, capacity=24, heads=1, dim=8, dtype=torch.float16, device=device)
    rows = full_rows(cache, [24], 2)
    before = cache.base.clone()
    table = cache.table.clone()
    table[0, 2:4] = 10**6  # evicted tokens alone: slots 8 to 15 are neither read nor written
    compact_kv_(cache.k, cache.v, i32([24], device), n_sink=2, n_recent=4, block_table=table)
    rows[0].compact(4)
    cache.expect(before, rows)


def test_compact_without_any_page(device):
    """Rows that hold nothing need no table entry."""
    cache = make_cache("paged", batch=3, capacity=8, heads=1, dim=8, dtype=torch.float16, device=device)
    before = cache.base.clone()
    compact_kv_(cache.k, cache.v, i32([0, -1, 0], device), n_sink=1, n_recent=2, block_table=cache.table[:, :0])
    assert torch.equal(bits(cache.base), bits(before))


# ---- append_kv_


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", [False, True])
def test_append_mixed_rows_with_padding(device, layout, dtype, padded):
    n_sink, batch, tokens = 2, 5, 9
    cache = make_cache(layout, batch=batch, capacity=24, heads=3, dim=16, dtype=dtype, device=device, seed=1)
    rows = [Row(n_sink, n_recent) for n_recent in (None, 5, 20, 6, None)]
    inactive = 4
    for step in range(4):
        k, v = chunk(batch, tokens if step else 5, 3, 16, dtype, device, seed=step)
        starts = [3, 0, k.shape[1] - 1, k.shape[1], 1] if padded else [0] * batch
        if step == 3:
            starts[0] = k.shape[1]  # the full row has no room left
            padded = True
        lengths = i32([-7 if b == inactive else row.length for b, row in enumerate(rows)], device)
        before = cache.base.clone()
        append_kv_(
            cache.k,
            cache.v,
            k,
            v,
            lengths,
            n_sink=n_sink,
            n_recent=n_recent_of(rows, device),
            block_table=cache.table,
            seq_start=i32(starts, device) if padded else None,
        )
        for b, row in enumerate(rows):
            for i in range(starts[b], k.shape[1]):
                if b != inactive:
                    row.append(k[b, i], v[b, i])
        cache.expect(before, rows)


def test_append_writes_only_what_survives(device):
    """A chunk of several turns of the ring: the slots hold its last tokens, and the sinks its first."""
    cache = make_cache("contiguous", batch=3, capacity=8, heads=2, dim=8, dtype=torch.float16, device=device)
    rows = [Row(2, 6), Row(2, 1), Row(8, 0 or None)]
    before = cache.base.clone()
    k, v = chunk(3, 100, 2, 8, torch.float16, device, seed=3)
    lengths, recents = i32([0, 0, -1], device), i32([6, 1, 0], device)
    if _library.namespace == "lighttransfer_sim":
        import cudasim

        with cudasim.record() as log:
            append_kv_(cache.k, cache.v, k, v, lengths, n_sink=2, n_recent=recents)
        # Of two tokens for one slot the later may come first on a GPU. 8 and 3 slots, K and V, 32 bytes each.
        assert sum(report.global_store["sectors"] for report in log.reports) == 2 * (8 + 3)
    else:
        append_kv_(cache.k, cache.v, k, v, lengths, n_sink=2, n_recent=recents)
    for b in (0, 1):
        for i in range(100):
            rows[b].append(k[b, i], v[b, i])
    cache.expect(before, rows)


def test_more_heads_than_a_block_has_threads(device):
    """All three ops: 70 heads of 32 elements are 280 vectors of 16 bytes a token."""
    n_sink, n_recent, heads = 2, 5, 70
    cache = make_cache("paged", batch=3, capacity=12, heads=heads, dim=32, dtype=torch.float16, device=device)
    rows = [Row(n_sink, n) for n in (None, n_recent, None)]
    before = cache.base.clone()
    k, v = chunk(3, 11, heads, 32, torch.float16, device, seed=1)
    recents, zeros = n_recent_of(rows, device), i32([0, 0, 0], device)
    append_kv_(cache.k, cache.v, k, v, zeros, n_sink=n_sink, n_recent=recents, block_table=cache.table)
    for b, row in enumerate(rows):
        for i in range(11):
            row.append(k[b, i], v[b, i])
    cache.expect(before, rows)
    before, lengths = cache.base.clone(), i32([11, 11, 11], device)
    cut = {"n_sink": n_sink, "n_recent": n_recent, "block_table": cache.table}
    compact_kv_(cache.k, cache.v, lengths, **cut, rows=i32([2], device))
    rows[2].compact(n_recent)
    cache.expect(before, rows)
    recents = n_recent_of(rows, device)
    window = {"n_sink": n_sink, "n_recent": recents, "block_table": cache.table}
    got_k, got_v, start = gather_kv(cache.k, cache.v, lengths, max_len=13, **window)
    assert start.tolist() == [2, 6, 6]
    for b, row in enumerate(rows):
        want = [torch.stack(side) for side in zip(*(token[1:] for token in row.in_order()), strict=True)]
        for got, side in zip((got_k, got_v), want, strict=True):
            assert torch.equal(bits(got[b, start[b] :]), bits(side))
            assert (got[b, : start[b]] == 0).all()


# ---- gather_kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_is_in_position_order_and_right_aligned(device, layout, dtype):
    n_sink, max_len, batch = 2, 25, 6
    cache = make_cache(layout, batch=batch, capacity=23, heads=3, dim=40, dtype=dtype, device=device)
    rows = [Row(n_sink, n_recent) for n_recent in (None, 5, 20, 5, 5, None)]
    lengths = [23, 31, 9, 7, 0, -3]
    for b, row in enumerate(rows):
        for position in range(lengths[b]):
            row.append(torch.zeros(0), torch.zeros(0))  # only to learn which position lies where
            slot = max(i for i, token in enumerate(row.slots) if token[0] == position)
            row.slots[slot] = (position, *(t.clone() for t in cache.slot(b, slot)))
    before = cache.base.clone()
    k, v, start = gather_kv(
        cache.k,
        cache.v,
        i32(lengths, device),
        n_sink=n_sink,
        n_recent=n_recent_of(rows, device),
        max_len=max_len,
        block_table=cache.table,
    )
    assert torch.equal(bits(cache.base), bits(before))
    for out, side in ((k, 1), (v, 2)):
        assert out.shape == (batch, max_len, 3, 40)
        assert out.is_contiguous()
        want = torch.zeros(out.shape, dtype=dtype, device=device)
        for b, row in enumerate(rows):
            for i, token in enumerate(row.in_order()):
                want[b, max_len - len(row.slots) + i] = cache.slot(b, row.slots.index(token))[side - 1]
        assert torch.equal(bits(out), bits(want))
    assert start.tolist() == [max_len - len(row.slots) for row in rows]
    assert start.dtype == torch.int32


# ---- all three


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_sequences_follow_the_oracle(device, data):
    n_sink = data.draw(st.integers(0, 4), "n_sink")
    recents = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=3, max_size=3), "n_recent")
    layout = data.draw(st.sampled_from(LAYOUTS), "layout")
    capacity = 40
    cache = make_cache(
        layout,
        batch=3,
        capacity=capacity,
        heads=2,
        dim=8,
        dtype=torch.bfloat16,
        device=device,
        page_size=data.draw(st.integers(1, 7), "page_size"),
    )
    rows = [Row(n_sink, n_recent) for n_recent in recents]
    for step in range(data.draw(st.integers(1, 6), "steps")):
        before = cache.base.clone()
        tokens = data.draw(st.integers(0, 12), "tokens")
        starts = data.draw(st.lists(st.integers(0, tokens), min_size=3, max_size=3), "seq_start")
        lengths = [row.length for row in rows]
        for b, row in enumerate(rows):
            if row.n_recent is None and row.length + tokens - starts[b] > capacity:
                lengths[b] = -1
        k, v = chunk(3, tokens, 2, 8, torch.bfloat16, device, seed=step)
        append_kv_(
            cache.k,
            cache.v,
            k,
            v,
            i32(lengths, device),
            n_sink=n_sink,
            n_recent=n_recent_of(rows, device),
            block_table=cache.table,
            seq_start=i32(starts, device),
        )
        for b, row in enumerate(rows):
            for i in range(starts[b], tokens if lengths[b] >= 0 else 0):
                row.append(k[b, i], v[b, i])
        cache.expect(before, rows)

        full = [b for b, row in enumerate(rows) if row.n_recent is None]
        cut = data.draw(st.lists(st.sampled_from(full), unique=True) if full else st.just([]), "compact")
        n_recent = data.draw(st.integers(1, 9), "n_recent of the cut")
        before = cache.base.clone()
        compact_kv_(
            cache.k,
            cache.v,
            i32([row.length for row in rows], device),
            n_sink=n_sink,
            n_recent=n_recent,
            block_table=cache.table,
            rows=i32(cut, device),
        )
        for b in cut:
            rows[b].compact(n_recent)
        cache.expect(before, rows)

        k, v, start = gather_kv(
            cache.k,
            cache.v,
            i32([row.length for row in rows], device),
            n_sink=n_sink,
            n_recent=n_recent_of(rows, device),
            max_len=capacity,
            block_table=cache.table,
        )
        for b, row in enumerate(rows):
            assert start[b] == capacity - len(row.slots)
            for i, (_, key, value) in enumerate(row.in_order()):
                assert torch.equal(bits(k[b, start[b] + i]), bits(key))
                assert torch.equal(bits(v[b, start[b] + i]), bits(value))
