"""Every op once more, slowly: one position at a time for the caches, dense fp64 softmax under 0/1 masks for attention.

Each function takes the op's arguments by name, writes to the caches among them and returns what the op returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _slot(t: int, n_sink: int, n_recent: int) -> int:
    return t if t < n_sink or n_recent == 0 else n_sink + (t - n_sink) % n_recent


def _stored(length: int, n_sink: int, n_recent: int) -> list[int]:
    recent = max(n_sink, length - n_recent) if n_recent else n_sink
    return [*range(min(n_sink, length)), *range(recent, length)]


def _at(cache: Tensor, table: Tensor | None, b: int, slot: int) -> Tensor:
    if table is None:
        return cache[b, slot]
    return cache[int(table[b, slot // cache.shape[1]]), slot % cache.shape[1]]


def _write(a: dict[str, Any], b: int, t: int, n_recent: int, k: Tensor, v: Tensor) -> None:
    for name, value in (("k_cache", k), ("v_cache", v)):
        _at(a[name], a.get("block_table"), b, _slot(t, a["n_sink"], n_recent)).copy_(value)


def append(a: dict[str, Any]) -> None:
    for b, length in enumerate(a["seq_len"].tolist()):
        start = 0 if a.get("seq_start") is None else int(a["seq_start"][b])
        for i in range(start, a["k"].shape[1]) if length >= 0 else ():
            _write(a, b, length + i - start, int(a["n_recent"][b]), a["k"][b, i], a["v"][b, i])


def compact(a: dict[str, Any]) -> None:
    rows = range(len(a["seq_len"])) if a.get("rows") is None else a["rows"].tolist()
    for b in rows:
        length = max(int(a["seq_len"][b]), 0)
        for t in _stored(length, a["n_sink"], a["n_recent"]):
            if _slot(t, a["n_sink"], a["n_recent"]) == t:
                continue  # in place: its page need not even be mapped
            k, v = (_at(a[name], a.get("block_table"), b, t).clone() for name in ("k_cache", "v_cache"))
            _write(a, b, t, a["n_recent"], k, v)


def gather(a: dict[str, Any]) -> tuple[Tensor, ...]:
    batch, heads, dim = len(a["seq_len"]), *a["k_cache"].shape[2:]
    k = torch.zeros(batch, a["max_len"], heads, dim, dtype=a["k_cache"].dtype)
    v, start = k.clone(), torch.full((batch,), a["max_len"], dtype=torch.int32)
    for b, length in enumerate(a["seq_len"].tolist()):
        n_recent = int(a["n_recent"][b])
        positions = _stored(length, a["n_sink"], n_recent) if length >= 0 else []
        start[b] -= len(positions)
        for i, t in enumerate(positions, int(start[b])):
            slot = _slot(t, a["n_sink"], n_recent)
            k[b, i], v[b, i] = (_at(a[name], a.get("block_table"), b, slot) for name in ("k_cache", "v_cache"))
    return k, v, start


def _softmax_state(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    """q [S_q, H_q, D], visible [S_q, S_k]: out, lse [H_q, S_q] and probabilities [H_q, S_q, S_k], in fp64."""
    groups = q.shape[1] // max(k.shape[1], 1)
    k, v = (t.double().repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", p, v), lse, p


def decode(a: dict[str, Any]) -> tuple[Tensor, ...]:
    batch, _, heads, _ = a["q"].shape
    out, lse = torch.zeros(a["q"].shape, dtype=torch.float64), torch.full((batch, heads, 1), -torch.inf).double()
    mass = torch.zeros((batch, heads, 2) if a["mass_n_recent"] >= 0 else (0,), dtype=torch.float64)
    for b, t in enumerate(a["seq_len"].tolist()):
        if t < 0:
            continue
        n_recent = int(a["n_recent"][b])
        _write(a, b, t, n_recent, a["k"][b, 0], a["v"][b, 0])
        positions = torch.tensor(_stored(t + 1, a["n_sink"], n_recent))
        slots = [_slot(int(p), a["n_sink"], n_recent) for p in positions]
        k, v = (torch.stack([_at(a[n], a.get("block_table"), b, s) for s in slots]) for n in ("k_cache", "v_cache"))
        out[b], lse[b], p = _softmax_state(a["q"][b], k, v, torch.ones(1, len(slots), dtype=torch.bool), a["scale"])
        if a["mass_n_recent"] >= 0:
            sink = positions < a["n_sink"]
            other = ~sink & (positions > t - a["mass_n_recent"])
            mass[b] = torch.stack([(p[:, 0] * sink).sum(-1), (p[:, 0] * other).sum(-1)], -1)
    return out, lse, mass


def prefill(a: dict[str, Any]) -> tuple[Tensor, ...]:
    (batch, n_queries, heads, _), n_keys = a["q"].shape, a["k"].shape[1]
    n_sink, n_recent = a.get("n_sink", 0), a.get("n_recent", -1)
    lazy = "n_last" in a
    n_last = a.get("n_last", 0)
    out = torch.zeros(a["q"].shape, dtype=torch.float64)
    lse = torch.zeros(batch, heads, n_queries).double()
    mass = torch.zeros(batch, heads, n_last, 2).double()
    for b in range(batch):
        start = 0 if a.get("seq_start") is None else int(a["seq_start"][b])
        j = torch.arange(n_keys) - start
        t = (torch.arange(n_queries) + n_keys - n_queries - start)[:, None]
        visible = ((j >= 0) & (j <= t)) if a.get("causal", True) else (j >= 0).expand(n_queries, n_keys)
        if n_recent >= 0 and not lazy:
            visible = visible & ((j < n_sink) | (j > t - n_recent))
        out[b], lse[b], p = _softmax_state(a["q"][b], a["k"][b], a["v"][b], visible, a["scale"])
        n = min(n_last, n_queries)
        if n:
            sink, kept = j < n_sink, j >= n_keys - start - n_recent
            mass[b, :, n_last - n :] = torch.stack([(p * sink).sum(-1), (p * (kept & ~sink)).sum(-1)], -1)[:, -n:]
    return (out, lse, mass) if lazy else (out, lse)


def mass(a: dict[str, Any]) -> tuple[Tensor, ...]:
    q, k = a["q_last"], a["k"]
    _, lse, mass = prefill(a | {"q": q, "v": k, "n_last": q.shape[1]})
    weight = (lse - a["lse_last"].double()).exp()[..., None]
    return (torch.where((a["lse_last"] == -torch.inf)[..., None], 0.0, mass * weight),)


def ratio(a: dict[str, Any]) -> tuple[Tensor, ...]:
    mass = a["mass"].double()
    counts = [mass.shape[2]] * len(mass) if a.get("n_queries") is None else a["n_queries"].tolist()
    rows = [mass[b, :, mass.shape[2] - n :].sum(-1) for b, n in enumerate(counts)]
    return (torch.tensor([row.mean() if row.numel() else 1.0 for row in rows]),)


def merge(a: dict[str, Any]) -> tuple[Tensor, ...]:
    lse = torch.logaddexp(a["lse_a"].double(), a["lse_b"].double())
    weights = [(a[n].double() - lse).exp().nan_to_num(0.0).transpose(1, 2)[..., None] for n in ("lse_a", "lse_b")]
    return weights[0] * a["out_a"].double() + weights[1] * a["out_b"].double(), lse
