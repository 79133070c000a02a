"""Caches, oracles and comparisons of a decode step, as its tests share them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from lighttransfer import _library
from lighttransfer.ops import streaming_decode


def padded(shape, dtype, seed):
    """Random values in a view that is contiguous in the last dimension alone."""
    g = torch.Generator().manual_seed(seed)
    full = torch.randn([n + 1 + i for i, n in enumerate(shape[:-1])] + [shape[-1] + 8], generator=g).to(dtype)
    return full[(*(slice(1, n + 1) for n in shape[:-1]), slice(0, shape[-1]))]


@dataclass
class Oracle:
    """What one row has seen, forgotten by the rule of the streaming mask."""

    n_sink: int
    n_recent: int  # 0: full row
    tokens: list = field(default_factory=list)  # (position, k, v)

    def append(self, position, k, v):
        self.tokens = [t for t in self.tokens if self.keeps(t[0], position)] + [(position, k, v)]

    def keeps(self, j, now):
        return self.n_recent == 0 or j < self.n_sink or j > now - self.n_recent

    def attend(self, q, scale, mass_n_recent=-1, dtype=torch.float64):
        """q [H_q, D] -> out [H_q, D], lse [H_q], mass [H_q, 2]; computed in `dtype`."""
        now = self.tokens[-1][0]
        ratio = q.shape[0] // self.tokens[0][1].shape[0]
        k = torch.stack([t[1] for t in self.tokens], 1).to(dtype).repeat_interleave(ratio, 0)  # [H_q, n, D]
        v = torch.stack([t[2] for t in self.tokens], 1).to(dtype).repeat_interleave(ratio, 0)
        scores = (q.to(dtype)[:, None] @ k.transpose(1, 2) * scale)[:, 0]
        p = scores.softmax(-1)
        sink = torch.tensor([t[0] < self.n_sink for t in self.tokens])
        kept = torch.tensor([t[0] > now - mass_n_recent for t in self.tokens]) & ~sink
        mass = torch.stack([(p * sink).sum(-1), (p * kept).sum(-1)], -1)
        return (p[:, None] @ v)[:, 0], scores.logsumexp(-1), mass


class Cache:
    """A cache with its own strides; paged: pages in an order that no row's slots follow, and spare ones.

    alike: keys and values have the same strides, as those of a model do.
    """

    def __init__(self, batch, capacity, n_kv_heads, head_dim, dtype, device, page_size=None, seed=0, alike=True):
        self.page_size, self.block_table = page_size, None
        if page_size is None:
            shape = (batch, capacity, n_kv_heads, head_dim)
        else:
            per_row = -(-capacity // page_size)
            shape = (batch * per_row + 3, page_size, n_kv_heads, head_dim)
            order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
            table = torch.full((batch, per_row + 2), -7, dtype=torch.int32)  # what no row uses is not a page
            table[:, :per_row] = order[: batch * per_row].reshape(batch, per_row)
            self.block_table = table[:, : per_row + 1].to(device)
        self.k, self.v = padded(shape, dtype, seed + 1).to(device), padded(shape, dtype, seed + 2).to(device)
        if not alike:
            self.v = self.v.transpose(1, 2).contiguous().transpose(1, 2)

    def at(self, b, slot):
        if self.page_size is None:
            return b, slot
        return int(self.block_table[b, slot // self.page_size]), slot % self.page_size


def ring_slot(position, n_sink, n_recent):
    return position if n_recent == 0 or position < n_sink else n_sink + (position - n_sink) % n_recent


def filled(
    lengths, n_recents, n_sink, capacity, n_kv_heads, head_dim, dtype, device, page_size=None, seed=0, alike=True
):
    """A cache in which row b has seen lengths[b] tokens, and the oracle of each row."""
    cache = Cache(len(lengths), capacity, n_kv_heads, head_dim, dtype, device, page_size, seed, alike)
    oracles, g = [Oracle(n_sink, n) for n in n_recents], torch.Generator()
    for b, (length, oracle) in enumerate(zip(lengths, oracles, strict=True)):
        k, v = torch.randn(2, max(length, 0), n_kv_heads, head_dim, generator=g.manual_seed(100 * seed + b)).to(dtype)
        for t in range(length):
            if oracle.keeps(t, length - 1):
                oracle.tokens.append((t, k[t], v[t]))
                page, slot = cache.at(b, ring_slot(t, n_sink, oracle.n_recent))
                cache.k[page, slot], cache.v[page, slot] = k[t].to(device), v[t].to(device)
    return cache, oracles


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Comparison:
    """At most twice the error of plain torch in the same precision, against float64, over all that was added."""

    def __init__(self):
        self.values = {}
        self.on_gpu = False

    def add(self, name, got, want, plain):
        self.on_gpu = got.is_cuda or _library.namespace != "lighttransfer"
        got = got.cpu().double()
        assert torch.equal(got.isfinite(), want.isfinite()), name
        # A row in which everything is wrong must not hide behind the others' errors.
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
        self.values.setdefault(name, []).append([x.double().flatten() for x in (got, want, plain)])

    def check(self):
        for name, values in self.values.items():
            got, want, plain = (torch.cat(x) for x in zip(*values, strict=True))
            # What tensor cores and ex2.approx leave of fp32, 2e-6 a value as in reference.assert_matches, and the
            # rounding of a large lse itself.
            floor = 1e-6 * len(want) ** 0.5 + torch.finfo(torch.float32).eps / 2 * want.norm().item()
            floor = floor if self.on_gpu and name != "out" else 0.0
            ours, theirs = (got - want).norm().item(), max((plain - want).norm().item(), floor)
            assert ours <= 2 * theirs, f"{name}: error {ours:.2e}, plain torch's {theirs:.2e}"


def check_step(q, k, v, lengths, cache, oracles, n_sink, device, mass_n_recent=-1, scale=None, comparison=None):
    """One step, compared row by row; the oracles advance. With a comparison given, its user checks it at the end."""
    out, lse, mass = streaming_decode(
        q.to(device),
        k.to(device),
        v.to(device),
        cache.k,
        cache.v,
        int32(lengths, device),
        n_sink=n_sink,
        n_recent=int32([o.n_recent for o in oracles], device),
        mass_n_recent=mass_n_recent,
        block_table=cache.block_table,
        scale=scale,
    )
    batch, _, n_heads, head_dim = q.shape
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert lse.shape == (batch, n_heads, 1)
    assert mass.shape == ((batch, n_heads, 2) if mass_n_recent >= 0 else (0,))
    assert lse.dtype == mass.dtype == torch.float32
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    errors = Comparison() if comparison is None else comparison
    for b, (length, oracle) in enumerate(zip(lengths, oracles, strict=True)):
        if length < 0:
            assert (out[b] == 0).all()
            assert (lse[b] == -torch.inf).all()
            assert mass_n_recent < 0 or (mass[b] == 0).all()
            continue
        oracle.append(length, k[b, 0], v[b, 0])
        want = oracle.attend(q[b, 0], scale, mass_n_recent)
        plain = oracle.attend(q[b, 0], scale, mass_n_recent, q.dtype)
        plain32 = oracle.attend(q[b, 0], scale, mass_n_recent, torch.float32)
        errors.add("out", out[b, 0], want[0], plain[0])
        errors.add("lse", lse[b, :, 0], want[1], plain32[1])
        if mass_n_recent >= 0:
            errors.add("mass", mass[b], want[2], plain32[2])
        page, slot = cache.at(b, ring_slot(length, n_sink, oracle.n_recent))
        assert torch.equal(cache.k[page, slot].cpu(), k[b, 0])
        assert torch.equal(cache.v[page, slot].cpu(), v[b, 0])
    if comparison is None:
        errors.check()
    return out, lse, mass


def inputs(batch, n_heads, n_kv_heads, head_dim, dtype, seed=0):
    return (
        padded((batch, 1, n_heads, head_dim), dtype, seed + 11),
        padded((batch, 1, n_kv_heads, head_dim), dtype, seed + 12),
        padded((batch, n_kv_heads, 1, head_dim), dtype, seed + 13).transpose(1, 2),
    )


def valid(device):
    cache, _ = filled([5, 9, 30], [0, 8, 8], 2, 32, 2, 16, torch.float16, device, 8)
    q, k, v = (x.to(device) for x in inputs(3, 4, 2, 16, torch.float16))
    args = dict(q=q, k=k, v=v, k_cache=cache.k, v_cache=cache.v, seq_len=int32([5, 9, 30], device))
    return args | dict(n_sink=2, n_recent=int32([0, 8, 8], device), block_table=cache.block_table)
