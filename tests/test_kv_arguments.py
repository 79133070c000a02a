"""compact_kv_, append_kv_ and gather_kv: empty sizes, arguments that do not fit, and what a tracer sees."""

from __future__ import annotations

import pytest
import torch
from kv_cases import APPEND, COMPACT, GATHER, apply, good_call, i32
from ring_oracle import bits, make_cache

from lighttransfer.ops import append_kv_, compact_kv_, gather_kv


def test_empty_sizes(device):
    half = {"dtype": torch.float16, "device": device}
    none, one = i32([], device), i32([0], device)
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
    k, _, start = gather_kv(no_heads, no_heads, i32([5], device), n_sink=0, n_recent=one, max_len=7)
    assert k.shape == (1, 7, 0, 8)
    assert start.tolist() == [2]


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
    cache, arguments = good_call(device)
    arguments[name] = change(arguments[name])
    before = cache.base.clone()
    with pytest.raises(kind, match=f"{op.__name__}: .*{text}"):
        apply(op, arguments)
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
    cache, arguments = good_call(device)
    arguments[name] = change(arguments[name])
    if isinstance(arguments[name], str):
        arguments[name] = arguments[arguments[name]]
    before = cache.base.clone()
    with pytest.raises(kind, match=text):
        apply(op, arguments)
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
    cache, arguments = good_call()
    if name == "block_table":
        arguments[name] = arguments[name].clone()
        arguments[name][2, value[0]] = value[1]
    else:
        arguments[name] = i32(value) if isinstance(value, list) else value
    if op is compact_kv_ and name == "block_table":
        arguments["n_recent"] = 5  # row 2 moves its slots 7 to 11 to 1 to 5
    before = cache.base.clone()
    if text is None:
        apply(op, arguments)
        return
    with pytest.raises(ValueError, match=text):
        apply(op, arguments)
    assert torch.equal(bits(cache.base), bits(before))


def test_append_checks_the_sinks_page():
    cache, arguments = good_call()
    arguments["block_table"] = cache.table.clone()
    arguments["block_table"][2, 0] = 99
    arguments["seq_len"] = i32([3, 9, 0])
    arguments["n_recent"][2] = 2
    arguments["n_sink"] = 1  # row 2 writes slot 0 and, wrapped, slots 1 and 2
    before = cache.base.clone()
    with pytest.raises(ValueError, match=r"page ids in .*, got 99 at \[2, 0\]"):
        apply(append_kv_, arguments)
    arguments["n_sink"] = 4  # row 2 writes sinks alone
    with pytest.raises(ValueError, match=r"page ids in .*, got 99 at \[2, 0\]"):
        apply(append_kv_, arguments)
    assert torch.equal(bits(cache.base), bits(before))


def test_inactive_rows_are_not_checked(device):
    cache, arguments = good_call(device)
    arguments["seq_len"] = i32([-1, -5, -(2**31)], device)
    arguments["n_recent"] = i32([-3, 4, 0], device)
    arguments["block_table"] = torch.full_like(cache.table, 10**6)
    before = cache.base.clone()
    apply(append_kv_, arguments)
    apply(compact_kv_, arguments)
    k, _, start = apply(gather_kv, arguments)
    assert torch.equal(bits(cache.base), bits(before))
    assert (k == 0).all()
    assert start.tolist() == [16, 16, 16]


def test_opcheck(device):
    cache, arguments = good_call(device)
    cache.base.fill_(1)  # opcheck compares values, and NaN differs from itself
    arguments["k"], arguments["v"] = (torch.full_like(arguments["k"], x).contiguous() for x in (2, 3))
    ops = torch.ops.lighttransfer
    for function, names in ((append_kv_, APPEND), (compact_kv_, COMPACT), (gather_kv, GATHER)):
        n_positional = names.index("n_sink")
        arguments["n_recent"] = 4 if function is compact_kv_ else i32([0, 4, 0], device)
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
        return cache.k, cache.v, k, v, i32([6, 0], device), i32([0, 0], device)

    want, eager = arguments(), arguments()
    expected = step(*want)
    results = torch.compile(step, fullgraph=True, backend="aot_eager")(*eager)
    for got, expect in zip((*results, *eager), (*expected, *want), strict=True):
        assert torch.equal(got, expect)
