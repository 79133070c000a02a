"""compact_kv_, append_kv_ and gather_kv against a list of (position, k, v); moves are exact to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_oracle import LAYOUTS, Row, bits, make_cache, random_bits

from lighttransfer.ops import append_kv_, compact_kv_, gather_kv

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def _i32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def _n_recent(rows, device):
    return _i32([row.n_recent or 0 for row in rows], device)


def _full_rows(cache, lengths, n_sink):
    """Oracle rows for what the cache's first slots hold already."""
    rows = []
    for b, length in enumerate(lengths):
        rows.append(Row(n_sink))
        for i in range(length):
            rows[-1].append(*cache.slot(b, i))
    return rows


def _chunk(batch, tokens, heads, dim, dtype, device, seed):
    g = torch.Generator().manual_seed(seed)
    k = random_bits((batch + 1, tokens + 2, heads + 1, dim + 8), dtype, g)[1:, 1:-1, 1:, :dim]
    v = random_bits((tokens, batch, heads, dim), dtype, g).transpose(0, 1)
    return k.to(device), v.to(device)


# ---- compact_kv_


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compact_moves_the_kept_tokens_to_their_slots(device, layout, dtype):
    n_sink, n_recent = 3, 7
    lengths = [29, 10, 11, 4, 0, 17, 18]  # beyond, at and just over the window, short, empty, whole turns
    cache = make_cache(layout, batch=7, capacity=30, heads=3, dim=24, dtype=dtype, device=device)
    rows = _full_rows(cache, lengths, n_sink)
    before = cache.base.clone()
    compact_kv_(cache.k, cache.v, _i32(lengths, device), n_sink=n_sink, n_recent=n_recent, block_table=cache.table)
    for row in rows:
        row.compact(n_recent)
    assert [token[0] for token in rows[0].slots[:3]] == [0, 1, 2]
    cache.expect(before, rows)


@pytest.mark.parametrize(("n_sink", "n_recent"), [(0, 1), (0, 5), (4, 1), (1, 8), (0, 64), (40, 3)])
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_compact_windows(device, layout, n_sink, n_recent):
    lengths = [41, 33, 6]
    cache = make_cache(layout, batch=3, capacity=41, heads=2, dim=8, dtype=torch.float16, device=device)
    rows = _full_rows(cache, lengths, n_sink)
    before = cache.base.clone()
    compact_kv_(cache.k, cache.v, _i32(lengths, device), n_sink=n_sink, n_recent=n_recent, block_table=cache.table)
    for row in rows:
        row.compact(n_recent)
    cache.expect(before, rows)


def test_compact_many_tasks(device):
    """Enough bytes for every thread to get some, with runs that cross pages and the wrap."""
    lengths = [1500, 900, 1023]
    cache = make_cache(
        "paged", batch=3, capacity=1504, heads=8, dim=64, dtype=torch.bfloat16, device=device, page_size=16
    )
    rows = _full_rows(cache, lengths, 4)
    before = cache.base.clone()
    compact_kv_(cache.k, cache.v, _i32(lengths, device), n_sink=4, n_recent=700, block_table=cache.table)
    for row in rows:
        row.compact(700)
    cache.expect(before, rows)


def test_compact_leaves_other_and_inactive_rows_alone(device):
    cache = make_cache("paged", batch=4, capacity=20, heads=2, dim=16, dtype=torch.float16, device=device)
    rows = _full_rows(cache, [20, 20, 20, 20], 1)
    before = cache.base.clone()
    compact_kv_(
        cache.k,
        cache.v,
        _i32([20, 20, -1, 20], device),
        n_sink=1,
        n_recent=4,
        block_table=cache.table,
        rows=_i32([3, 2, 0], device),
    )
    rows[0].compact(4)
    rows[3].compact(4)
    cache.expect(before, rows)


def test_compact_needs_only_the_pages_it_touches(device):
    cache = make_cache("paged", batch=1, capacity=24, heads=1, dim=8, dtype=torch.float16, device=device)
    rows = _full_rows(cache, [24], 2)
    before = cache.base.clone()
    table = cache.table.clone()
    table[0, 2:4] = 10**6  # evicted tokens alone: slots 8 to 15 are neither read nor written
    compact_kv_(cache.k, cache.v, _i32([24], device), n_sink=2, n_recent=4, block_table=table)
    rows[0].compact(4)
    cache.expect(before, rows)


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
        k, v = _chunk(batch, tokens if step else 5, 3, 16, dtype, device, seed=step)
        starts = [3, 0, k.shape[1] - 1, k.shape[1], 1] if padded else [0] * batch
        if step == 3:
            starts[0] = k.shape[1]  # the full row has no room left
            padded = True
        lengths = _i32([-7 if b == inactive else row.length for b, row in enumerate(rows)], device)
        before = cache.base.clone()
        append_kv_(
            cache.k,
            cache.v,
            k,
            v,
            lengths,
            n_sink=n_sink,
            n_recent=_n_recent(rows, device),
            block_table=cache.table,
            seq_start=_i32(starts, device) if padded else None,
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
    k, v = _chunk(3, 100, 2, 8, torch.float16, device, seed=3)
    append_kv_(
        cache.k,
        cache.v,
        k,
        v,
        _i32([0, 0, -1], device),
        n_sink=2,
        n_recent=_i32([6, 1, 0], device),
    )
    for b in (0, 1):
        for i in range(100):
            rows[b].append(k[b, i], v[b, i])
    cache.expect(before, rows)


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
        _i32(lengths, device),
        n_sink=n_sink,
        n_recent=_n_recent(rows, device),
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
        k, v = _chunk(3, tokens, 2, 8, torch.bfloat16, device, seed=step)
        append_kv_(
            cache.k,
            cache.v,
            k,
            v,
            _i32(lengths, device),
            n_sink=n_sink,
            n_recent=_n_recent(rows, device),
            block_table=cache.table,
            seq_start=_i32(starts, device),
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
            _i32([row.length for row in rows], device),
            n_sink=n_sink,
            n_recent=n_recent,
            block_table=cache.table,
            rows=_i32(cut, device),
        )
        for b in cut:
            rows[b].compact(n_recent)
        cache.expect(before, rows)

        k, v, start = gather_kv(
            cache.k,
            cache.v,
            _i32([row.length for row in rows], device),
            n_sink=n_sink,
            n_recent=_n_recent(rows, device),
            max_len=capacity,
            block_table=cache.table,
        )
        for b, row in enumerate(rows):
            assert start[b] == capacity - len(row.slots)
            for i, (_, key, value) in enumerate(row.in_order()):
                assert torch.equal(bits(k[b, start[b] + i]), bits(key))
                assert torch.equal(bits(v[b, start[b] + i]), bits(value))


# ---- empty sizes, errors, tracing


def test_empty_sizes(device):
    half = {"dtype": torch.float16, "device": device}
    none, one = _i32([], device), _i32([0], device)
    empty = torch.zeros(0, 5, 2, 8, **half)
    compact_kv_(empty, empty, none, n_sink=1, n_recent=2)
    append_kv_(empty, empty, empty, empty, none, n_sink=1, n_recent=none)
    k, _, start = gather_kv(empty, empty, none, n_sink=1, n_recent=none, max_len=3)
    assert k.shape == (0, 3, 2, 8)
    assert start.shape == (0,)
    cache = torch.zeros(1, 5, 2, 8, **half)
    append_kv_(cache, cache.clone(), cache[:, :0], cache[:, :0], one, n_sink=0, n_recent=one)
    compact_kv_(cache, cache.clone(), one, n_sink=1, n_recent=2, rows=none)
    k, _, start = gather_kv(cache, cache.clone(), one, n_sink=0, n_recent=one, max_len=0)
    assert k.shape == (1, 0, 2, 8)
    no_heads = torch.zeros(1, 5, 0, 8, **half)
    k, _, start = gather_kv(no_heads, no_heads, _i32([5], device), n_sink=0, n_recent=one, max_len=7)
    assert k.shape == (1, 7, 0, 8)
    assert start.tolist() == [2]


def _good_call(device="cpu"):
    cache = make_cache("paged", batch=3, capacity=16, heads=2, dim=8, dtype=torch.float16, device=device)
    k, v = _chunk(3, 4, 2, 8, torch.float16, device, seed=0)
    return cache, {
        "k_cache": cache.k,
        "v_cache": cache.v,
        "k": k,
        "v": v,
        "seq_len": _i32([3, 9, 12], device),
        "n_sink": 1,
        "n_recent": _i32([0, 4, 0], device),
        "block_table": cache.table,
        "seq_start": _i32([0, 1, 0], device),
        "max_len": 16,
        "rows": _i32([2, 0], device),
    }


APPEND = ("k_cache", "v_cache", "k", "v", "seq_len", "n_sink", "n_recent", "block_table", "seq_start")
COMPACT = ("k_cache", "v_cache", "seq_len", "n_sink", "n_recent", "block_table", "rows")
GATHER = ("k_cache", "v_cache", "seq_len", "n_sink", "n_recent", "max_len", "block_table")


def _apply(op, arguments):
    names = {append_kv_: APPEND, compact_kv_: COMPACT, gather_kv: GATHER}[op]
    arguments = {name: arguments[name] for name in names}
    if op is compact_kv_ and isinstance(arguments["n_recent"], torch.Tensor):
        arguments["n_recent"] = 4
    return op(**arguments)


ARGUMENT_ERRORS = [
    ("k_cache", lambda t: t.double(), TypeError, "k_cache must have dtype Half.* BFloat16.*, got Double"),
    ("k_cache", lambda t: t[0], ValueError, r"k_cache must have shape .*, got \[4, 2, 8\]"),
    ("v_cache", lambda t: t.bfloat16(), TypeError, "v_cache must have dtype Half, got BFloat16"),
    ("v_cache", lambda t: t[1:], ValueError, "v_cache must have shape"),
    ("v_cache", lambda t: t[:, :1].expand_as(t), ValueError, "v_cache must have elements that do not overlap"),
    ("v_cache", lambda t: t.mT.contiguous().mT, ValueError, "v_cache must have unit stride in its last dimension"),
    ("seq_len", lambda t: t.long(), TypeError, "seq_len must have dtype Int, got Long"),
    ("block_table", lambda t: t.long(), TypeError, "block_table must have dtype Int, got Long"),
    ("block_table", lambda t: t[:2], ValueError, "block_table must have shape"),
    ("n_sink", lambda _: -1, ValueError, r"n_sink must lie in \[0, 2147483647\], got -1"),
]


@pytest.mark.parametrize("op", [append_kv_, compact_kv_, gather_kv])
@pytest.mark.parametrize(("name", "change", "kind", "text"), ARGUMENT_ERRORS)
def test_argument_errors_leave_every_buffer(device, op, name, change, kind, text):
    cache, arguments = _good_call(device)
    arguments[name] = change(arguments[name])
    before = cache.base.clone()
    with pytest.raises(kind, match=f"{op.__name__}: .*{text}"):
        _apply(op, arguments)
    assert torch.equal(bits(cache.base), bits(before))


@pytest.mark.parametrize(
    ("op", "name", "change", "kind", "text"),
    [
        (append_kv_, "k", lambda t: t[:, :, :1], ValueError, "k_cache must have shape"),
        (append_kv_, "k", lambda t: t.bfloat16(), TypeError, "k must have dtype Half, got BFloat16"),
        (compact_kv_, "k_cache", lambda t: t[..., :4], ValueError, "head_dim that is a multiple of 8 in .*, got 4"),
        (append_kv_, "v", lambda t: t[:, 1:], ValueError, "v must have shape"),
        (append_kv_, "v", lambda t: t.float(), TypeError, "v must have dtype Half, got Float"),
        (append_kv_, "n_recent", lambda t: t[:2], ValueError, r"n_recent must have shape \[B\] = \[3\]"),
        (append_kv_, "seq_start", lambda t: t.repeat(2)[::2], ValueError, "seq_start must be contiguous"),
        (compact_kv_, "n_recent", lambda _: 0, ValueError, r"n_recent must lie in \[1, .*, got 0"),
        (compact_kv_, "rows", lambda t: t.long(), TypeError, "rows must have dtype Int, got Long"),
        (gather_kv, "max_len", lambda _: -1, ValueError, r"max_len must lie in \[0, .*, got -1"),
        (append_kv_, "v_cache", lambda _: "k_cache", ValueError, "v_cache must not be the memory of k_cache"),
    ],
)
def test_errors_of_one_op(device, op, name, change, kind, text):
    cache, arguments = _good_call(device)
    arguments[name] = change(arguments[name])
    if isinstance(arguments[name], str):
        arguments[name] = arguments[arguments[name]]
    before = cache.base.clone()
    with pytest.raises(kind, match=text):
        _apply(op, arguments)
    assert torch.equal(bits(cache.base), bits(before))


@pytest.mark.parametrize(
    ("op", "name", "value", "text"),
    [
        # In each case an earlier row is in order: it must not have been written either.
        (append_kv_, "seq_len", [3, 9, 30], "capacity of 24 slots, got a need for 34 in row 2"),
        (append_kv_, "seq_len", [3, 9, 14], r"page ids in \[0, 15\) where .*, got -1 at \[2, 4\]"),
        (append_kv_, "n_recent", [0, 4, -1], "n_recent must lie in .* in every row, got -1 in row 2"),
        (append_kv_, "n_recent", [0, 40, 0], None),
        (append_kv_, "seq_start", [0, 1, 5], r"seq_start must lie in \[0, 4\] in every row, got 5 in row 2"),
        (append_kv_, "seq_start", [0, -1, 0], r"seq_start must lie in \[0, 4\] in every row, got -1 in row 1"),
        (append_kv_, "seq_len", [3, 9, 2**31 - 1], "capacity"),
        (append_kv_, "block_table", (3, 15), r"page ids in \[0, 15\) where .*, got 15 at"),
        (append_kv_, "block_table", (3, -(2**31)), "page ids in"),
        (compact_kv_, "seq_len", [16, 9, 25], "capacity of 24 slots, got a need for 25 in row 2"),
        (compact_kv_, "rows", [0, 3], r"rows must lie in \[0, 2\] in every row, got 3 in row 1"),
        (compact_kv_, "rows", [0, -1], r"rows must lie in \[0, 2\]"),
        (compact_kv_, "rows", [0, 2, 0], "rows must name a row once, got 0 again"),
        (compact_kv_, "block_table", (2, 2**31 - 1), "page ids in"),
        (compact_kv_, "block_table", (0, -1), r"page ids in .*, got -1 at \[2, 0\]"),
        (gather_kv, "seq_len", [3, 9, 25], "capacity of 24 slots, got a need for 25 in row 2"),
        (gather_kv, "seq_len", [3, 9, 17], r"got -1 at \[2, 4\]"),
        (gather_kv, "n_recent", [0, -5, 0], "n_recent must lie in"),
        (gather_kv, "max_len", 11, "max_len must hold every row's cached tokens, 12 in row 2, got 11"),
        (gather_kv, "block_table", (2, 15), "page ids in"),
    ],
)
def test_row_errors_leave_every_buffer(op, name, value, text):
    """Row values are checked on the CPU, where reading them costs nothing."""
    cache, arguments = _good_call()
    if name == "block_table":
        arguments[name] = arguments[name].clone()
        arguments[name][2, value[0]] = value[1]
    else:
        arguments[name] = _i32(value) if isinstance(value, list) else value
    if op is compact_kv_ and name == "block_table":
        arguments["n_recent"] = 5  # row 2 moves its slots 7 to 11 to 1 to 5
    before = cache.base.clone()
    if text is None:
        _apply(op, arguments)
        return
    with pytest.raises(ValueError, match=text):
        _apply(op, arguments)
    assert torch.equal(bits(cache.base), bits(before))


def test_append_checks_the_sinks_page():
    cache, arguments = _good_call()
    arguments["block_table"] = cache.table.clone()
    arguments["block_table"][2, 0] = 99
    arguments["seq_len"] = _i32([3, 9, 0])
    arguments["n_recent"][2] = 2
    arguments["n_sink"] = 1  # row 2 writes slot 0 and, wrapped, slots 1 and 2
    before = cache.base.clone()
    with pytest.raises(ValueError, match=r"page ids in .*, got 99 at \[2, 0\]"):
        _apply(append_kv_, arguments)
    arguments["n_sink"] = 4  # row 2 writes sinks alone
    with pytest.raises(ValueError, match=r"page ids in .*, got 99 at \[2, 0\]"):
        _apply(append_kv_, arguments)
    assert torch.equal(bits(cache.base), bits(before))


def test_inactive_rows_are_not_checked(device):
    cache, arguments = _good_call(device)
    arguments["seq_len"] = _i32([-1, -5, -(2**31)], device)
    arguments["n_recent"] = _i32([-3, 4, 0], device)
    arguments["block_table"] = torch.full_like(cache.table, 10**6)
    before = cache.base.clone()
    _apply(append_kv_, arguments)
    _apply(compact_kv_, arguments)
    k, _, start = _apply(gather_kv, arguments)
    assert torch.equal(bits(cache.base), bits(before))
    assert (k == 0).all()
    assert start.tolist() == [16, 16, 16]


def test_opcheck(device):
    cache, arguments = _good_call(device)
    cache.base.fill_(1)  # opcheck compares values, and NaN differs from itself
    arguments["k"], arguments["v"] = (torch.full_like(arguments["k"], x).contiguous() for x in (2, 3))
    ops = torch.ops.lighttransfer
    for function, names in ((append_kv_, APPEND), (compact_kv_, COMPACT), (gather_kv, GATHER)):
        n_positional = names.index("n_sink")
        arguments["n_recent"] = 4 if function is compact_kv_ else _i32([0, 4, 0], device)
        torch.library.opcheck(
            getattr(ops, function.__name__).default,
            tuple(arguments[name] for name in names[:n_positional]),
            {name: arguments[name] for name in names[n_positional:]},
        )


def test_compiles_without_graph_breaks(device):
    def step(k_cache, v_cache, k, v, seq_len, n_recent):
        append_kv_(k_cache, v_cache, k, v, seq_len, n_sink=1, n_recent=n_recent)
        gathered = gather_kv(k_cache, v_cache, seq_len + k.shape[1], n_sink=1, n_recent=n_recent, max_len=12)
        compact_kv_(k_cache, v_cache, seq_len + k.shape[1], n_sink=1, n_recent=3)
        return (*gathered, k_cache * 2)

    def arguments():
        cache = make_cache("padded", batch=2, capacity=12, heads=2, dim=8, dtype=torch.bfloat16, device=device)
        cache.base.fill_(0.0)
        k, v = (torch.arange(2 * 5 * 16.0, device=device).reshape(2, 5, 2, 8).bfloat16() + i for i in (0, 1))
        return cache.k, cache.v, k, v, _i32([6, 0], device), _i32([0, 0], device)

    want, eager = arguments(), arguments()
    expected = step(*want)
    results = torch.compile(step, fullgraph=True, backend="aot_eager")(*eager)
    for got, expect in zip((*results, *eager), (*expected, *want), strict=True):
        assert torch.equal(got, expect)
