"""Chunks, rows and whole calls of the cache ops, as their tests share them."""

from __future__ import annotations

import torch
from ring_oracle import Row, make_cache, random_bits

from lighttransfer.ops import append_kv_, compact_kv_, gather_kv

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def i32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def n_recent_of(rows, device):
    return i32([row.n_recent or 0 for row in rows], device)


def full_rows(cache, lengths, n_sink):
    """Oracle rows for what the cache's first slots hold already."""
    rows = []
    for b, length in enumerate(lengths):
        rows.append(Row(n_sink))
        for i in range(length):
            rows[-1].append(*cache.slot(b, i))
    return rows


def chunk(batch, tokens, heads, dim, dtype, device, seed):
    g = torch.Generator().manual_seed(seed)
    k = random_bits((batch + 1, tokens + 2, heads + 1, dim + 8), dtype, g)[1:, 1:-1, 1:, :dim]
    v = random_bits((tokens, batch, heads, dim), dtype, g).transpose(0, 1)
    return k.to(device), v.to(device)


def good_call(device="cpu"):
    cache = make_cache("paged", batch=3, capacity=16, heads=2, dim=8, dtype=torch.float16, device=device)
    k, v = chunk(3, 4, 2, 8, torch.float16, device, seed=0)
    return cache, {
        "k_cache": cache.k,
        "v_cache": cache.v,
        "k": k,
        "v": v,
        "seq_len": i32([3, 9, 12], device),
        "n_sink": 1,
        "n_recent": i32([0, 4, 0], device),
        "block_table": cache.table,
        "seq_start": i32([0, 1, 0], device),
        "max_len": 16,
        "rows": i32([2, 0], device),
    }


APPEND = ("k_cache", "v_cache", "k", "v", "seq_len", "n_sink", "n_recent", "block_table", "seq_start")
COMPACT = ("k_cache", "v_cache", "seq_len", "n_sink", "n_recent", "block_table", "rows")
GATHER = ("k_cache", "v_cache", "seq_len", "n_sink", "n_recent", "max_len", "block_table")


def apply(op, arguments):
    names = {append_kv_: APPEND, compact_kv_: COMPACT, gather_kv: GATHER}[op]
    arguments = {name: arguments[name] for name in names}
    if op is compact_kv_ and isinstance(arguments["n_recent"], torch.Tensor):
        arguments["n_recent"] = 4
    return op(**arguments)
