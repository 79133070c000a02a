"""streaming_decode against a Python list of (position, k, v) and a float64 softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from lighttransfer import _library
from lighttransfer.ops import streaming_decode

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


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


# Rows: inactive; first token; ring not full, exactly full (before and after the token), wrapped once and often;
# full rows shorter and longer than one split.
LENGTHS = [-1, 0, 5, 35, 36, 37, 200, 63, 64, 300, 530]
N_RECENTS = [32, 32, 32, 32, 32, 32, 32, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("page_size", "mass_n_recent"), [(None, 8), (16, -1), (7, 8), (1, 8), (64, -1), (96, 8)])
def test_full_and_ring_rows_in_one_call(device, dtype, page_size, mass_n_recent, alike):
    cache, oracles = filled(LENGTHS, N_RECENTS, 4, 600, 2, 64, dtype, device, page_size, alike=alike)
    q, k, v = inputs(len(LENGTHS), 6, 2, 64, dtype)
    check_step(q, k, v, LENGTHS, cache, oracles, 4, device, mass_n_recent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [None, 64])
def test_long_rows(device, dtype, page_size):
    """Up to 8,192 keys a GPU's split is one tile of 64, then two, then four."""
    lengths, n_recents = [8_191, 8_300, 16_500, 20_000], [0, 0, 0, 8_250]
    cache, oracles = filled(lengths, n_recents, 4, 16_512, 1, 32, dtype, device, page_size)
    # Sums of so many weights in fp32 leave the CPU's masses a few 1e-8 off.
    on_cpu = device == "cpu" and _library.namespace == "lighttransfer"
    check_step(*inputs(4, 3, 1, 32, dtype), lengths, cache, oracles, 4, device, -1 if on_cpu else 300)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "head_dim"),
    [(h, kv, d) for h, kv in ((2, 2), (8, 2), (16, 2), (5, 1), (7, 1)) for d in (64, 120, 256)]
    + [(9, 3, d) for d in (8, 64, 72, 96, 104, 128)],
)
def test_heads_and_head_dims(device, dtype, n_heads, n_kv_heads, head_dim):
    lengths, n_recents = [70, 9, 300], [0, 16, 130]
    cache, oracles = filled(lengths, n_recents, 3, 310, n_kv_heads, head_dim, dtype, device, 32)
    comparison = Comparison()
    for step in range(5):
        q, k, v = inputs(3, n_heads, n_kv_heads, head_dim, dtype, seed=100 * step)
        at = [n + step for n in lengths]
        check_step(q, k, v, at, cache, oracles, 3, device, mass_n_recent=20, comparison=comparison)
    comparison.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [None, 8])
def test_many_steps_across_wraps(device, dtype, page_size):
    lengths, n_recents, n_sink = [0, 3, 0], [10, 1, 0], 2
    cache, oracles = filled(lengths, n_recents, n_sink, 40, 2, 16, dtype, device, page_size)
    comparison = Comparison()
    for step in range(37):
        q, k, v = inputs(3, 4, 2, 16, dtype, seed=100 * step)
        check_step(q, k, v, lengths, cache, oracles, n_sink, device, step % 14, comparison=comparison)
        lengths = [n + 1 for n in lengths]
    comparison.check()


@pytest.mark.parametrize("n_sink", [0, 1, 300])
@pytest.mark.parametrize("mass_n_recent", [0, 1, 40, 2**31 - 1])
def test_mass_windows(device, n_sink, mass_n_recent):
    lengths, n_recents = [20, 90, 345, 701, 600], [0, 64, 40, 45, 0]
    cache, oracles = filled(lengths, n_recents, n_sink, 720, 1, 16, torch.float16, device, 32)
    q, k, v = inputs(5, 3, 1, 16, torch.float16)
    _, _, mass = check_step(3 * q, k, v, lengths, cache, oracles, n_sink, device, mass_n_recent)
    if mass_n_recent > 1000:
        torch.testing.assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_scale(device, scale):
    lengths, n_recents = [70, 9, 300], [0, 16, 130]
    cache, oracles = filled(lengths, n_recents, 3, 310, 2, 32, torch.float16, device)
    check_step(*inputs(3, 4, 2, 32, torch.float16), lengths, cache, oracles, 3, device, 20, scale)


def run(cache, q, k, v, lengths, n_recents, device, rows=slice(None), width=None):
    """The step on copies of the cache, for some of the rows."""
    table = cache.block_table[rows, :width].contiguous()
    return streaming_decode(
        q[rows],
        k[rows],
        v[rows],
        cache.k.clone(),
        cache.v.clone(),
        int32(lengths, device)[rows],
        n_sink=4,
        n_recent=int32(n_recents, device)[rows],
        mass_n_recent=100,
        block_table=table,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_batch_bitwise(device, dtype):
    lengths, n_recents = [5, 900, 1500, 400, 1200], [0, 0, 300, 1020, 1020]
    cache, _ = filled(lengths, n_recents, 4, 1504, 2, 64, dtype, device, 32)
    q, k, v = (x.to(device) for x in inputs(5, 8, 2, 64, dtype))
    together = run(cache, q, k, v, lengths, n_recents, device)
    order = [3, 1, 4, 0, 2]
    shuffled = run(cache, q, k, v, lengths, n_recents, device, order)
    for got, want in zip(shuffled, together, strict=True):
        assert torch.equal(got, want[order])
    for b in range(5):
        alone = run(cache, q, k, v, lengths, n_recents, device, [b], width=-(-1504 // 32))
        for got, want in zip(alone, together, strict=True):
            assert torch.equal(got[0], want[b]), b


def test_number_of_threads_changes_nothing(device):
    if device != "cpu":
        pytest.skip("torch's threads run CPU ops alone")
    lengths, n_recents = [5, 900, 1500], [0, 0, 300]
    cache, _ = filled(lengths, n_recents, 4, 1504, 3, 64, torch.bfloat16, device, 32)
    q, k, v = inputs(3, 9, 3, 64, torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            results.append(run(cache, q, k, v, lengths, n_recents, device))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert torch.equal(got, want)


def test_slots_outside_the_row_are_never_read(device):
    lengths, n_recents = [20, 9, 300], [0, 16, 64]
    cache, oracles = filled(lengths, n_recents, 3, 310, 2, 32, torch.float16, device, 16)
    held = torch.zeros(cache.k.shape[:2], dtype=torch.bool)
    for b, oracle in enumerate(oracles):
        for t in [*(t[0] for t in oracle.tokens), lengths[b]]:
            held[cache.at(b, ring_slot(t, 3, oracle.n_recent))] = True
    for side in (cache.k, cache.v):
        side[~held.to(device)] = torch.nan
    before = [side.clone() for side in (cache.k, cache.v)]
    check_step(*inputs(3, 4, 2, 32, torch.float16), lengths, cache, oracles, 3, device, 20)
    for side, old in zip((cache.k, cache.v), before, strict=True):
        changed = (side != old) & ~(side.isnan() & old.isnan())
        assert changed.any(-1).any(-1).sum() <= 3  # the new tokens' slots alone


def test_inputs_off_any_alignment(device):
    """q, k and v may lie at any address; a cache that a GPU writes 16 bytes at a time may not."""
    lengths, n_recents = [20, 9, 300], [0, 16, 64]
    cache, oracles = filled(lengths, n_recents, 3, 310, 2, 32, torch.float16, device, 16)

    def shifted(t):
        return t.new_empty(*t.shape[:-1], t.shape[-1] + 1)[..., 1:].copy_(t)

    check_step(*(shifted(t) for t in inputs(3, 4, 2, 32, torch.float16)), lengths, cache, oracles, 3, device, 20)
    args = valid(device)
    args["k_cache"] = shifted(args["k_cache"])
    if device == "cpu" and _library.namespace == "lighttransfer":
        streaming_decode(**args)
        return
    with pytest.raises(ValueError, match="k_cache must have rows that start at multiples of 16 bytes on a GPU"):
        streaming_decode(**args)


def test_large_and_infinite_scores(device):
    lengths, n_recents = [70, 600], [0, 0]
    cache, oracles = filled(lengths, n_recents, 3, 610, 1, 32, torch.bfloat16, device)
    q, k, v = inputs(2, 2, 1, 32, torch.bfloat16)
    check_step(q * 300, k, v, lengths, cache, oracles, 3, device, 20)
    # A score of -inf takes its key out; if every score is -inf the state is the empty one.
    cache.k[0, :70], cache.k[1, :300] = -torch.inf, -torch.inf
    q, k = torch.ones_like(q), torch.ones_like(k)
    k[0] = -torch.inf
    out, lse, mass = streaming_decode(
        *(x.to(device) for x in (q, k, v)),
        cache.k,
        cache.v,
        int32([70, 601], device),
        n_sink=3,
        n_recent=int32([0, 0], device),
        mass_n_recent=20,
    )
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert (mass[0] == 0).all()
    assert out[1].isfinite().all()
    assert (mass[1, :, 0] == 0).all()
    cache.v[1, 555] = torch.nan
    out, _, _ = streaming_decode(
        *(x.to(device) for x in (q, k, v)),
        cache.k,
        cache.v,
        int32([-1, 602], device),
        n_sink=3,
        n_recent=int32([0, 0], device),
    )
    assert out[1].isnan().all()
    assert (out[0] == 0).all()


@pytest.mark.parametrize("shape", [(0, 4, 2, 32), (2, 0, 0, 32)])
def test_empty_dimensions(device, shape):
    batch, n_heads, n_kv_heads, head_dim = shape
    q, k, v = (x.to(device) for x in inputs(batch, n_heads, n_kv_heads, head_dim, torch.float16))
    cache = torch.zeros(2, batch, 5, n_kv_heads, head_dim, dtype=torch.float16, device=device)
    n = int32([0] * batch, device)
    out, lse, mass = streaming_decode(q, k, v, *cache, n, n_sink=1, n_recent=n, mass_n_recent=1)
    assert out.shape == q.shape
    assert lse.shape == (batch, n_heads, 1)
    assert mass.shape == (batch, n_heads, 2)


def valid(device):
    cache, _ = filled([5, 9, 30], [0, 8, 8], 2, 32, 2, 16, torch.float16, device, 8)
    q, k, v = (x.to(device) for x in inputs(3, 4, 2, 16, torch.float16))
    args = dict(q=q, k=k, v=v, k_cache=cache.k, v_cache=cache.v, seq_len=int32([5, 9, 30], device))
    return args | dict(n_sink=2, n_recent=int32([0, 8, 8], device), block_table=cache.block_table)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: {"q": a["q"][0]}, ValueError, r"q must have shape \[B, 1, H_q, D\]"),
        (lambda a: {"q": a["q"][:, :, :3]}, ValueError, "q must have a number of heads .* got 3 heads over 2 KV heads"),
        (
            lambda a: {"q": a["q"].float()},
            TypeError,
            "(k must have dtype Float, got Half|q must have .* on a GPU, got Float)",
        ),
        (lambda a: {"q": a["q"].int()}, TypeError, "q must have dtype"),
        (lambda a: {"q": None}, TypeError, "q must be a tensor, got None"),
        (lambda a: {"k": a["k"][:2]}, ValueError, "k must have shape"),
        (lambda a: {"v": a["v"][..., :8]}, ValueError, "v must have shape"),
        (lambda a: {"v": a["v"].bfloat16()}, TypeError, "v must have dtype Half, got BFloat16"),
        (lambda a: {"k_cache": a["k_cache"].float()}, TypeError, "k_cache must have dtype Half, got Float"),
        (lambda a: {"v_cache": a["v_cache"].float()}, TypeError, "v_cache must have dtype Half, got Float"),
        (lambda a: {"v_cache": a["v_cache"][:-1]}, ValueError, "v_cache must have shape"),
        (lambda a: {"v_cache": a["k_cache"]}, ValueError, "v_cache must not be the memory of k_cache"),
        (lambda a: {"seq_len": a["seq_len"].long()}, TypeError, "seq_len must have dtype Int, got Long"),
        (lambda a: {"seq_len": a["seq_len"][:2]}, ValueError, r"seq_len must have shape \[B\] = \[3\], got \[2\]"),
        (lambda a: {"n_recent": a["n_recent"].float()}, TypeError, "n_recent must have dtype Int, got Float"),
        (lambda a: {"n_sink": -1}, ValueError, r"n_sink must lie in \[0, 2147483647\], got -1"),
        (lambda a: {"mass_n_recent": -2}, ValueError, r"mass_n_recent must lie in \[-1, 2147483647\], got -2"),
        (lambda a: {"block_table": a["block_table"][:2]}, ValueError, "block_table must have shape"),
        (lambda a: {"block_table": a["block_table"].long()}, TypeError, "block_table must have dtype Int"),
        (lambda a: {"scale": "2"}, TypeError, "scale"),
        (lambda a: {"scale": 0.0}, ValueError, "scale must be a positive finite number, got 0"),
        (lambda a: {"scale": -0.5}, ValueError, "scale must be a positive finite number, got -0.5"),
        (lambda a: {"scale": math.nan}, ValueError, "scale must be a positive finite number, got nan"),
        (lambda a: {n: a[n][..., :12] for n in ("q", "k", "v", "k_cache", "v_cache")}, ValueError, "q must .* 12"),
    ],
)
def test_errors_name_argument_rule_and_value(device, change, error, message):
    args = valid(device)
    before = args["k_cache"].clone(), args["v_cache"].clone()
    with pytest.raises(error, match=message):
        streaming_decode(**(args | change(args)))
    assert torch.equal(args["k_cache"], before[0])
    assert torch.equal(args["v_cache"], before[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"seq_len": [5, 9, 2**31 - 1], "n_recent": [0, 8, 0]},
            "of 40 slots, got a need for 2147483648 in row 2",
        ),
        ({"n_recent": [0, 8, 39], "seq_len": [5, 9, 40]}, "seq_len must .* a need for 41 in row 2"),
        ({"n_recent": [0, 8, -1]}, r"n_recent must lie in \[0, 2147483647\] in every row, got -1 in row 2"),
        ({"n_recent": [0, 8, 0], "seq_len": [5, 9, 33]}, r"block_table must hold page ids .* got -7 at \[2, 4\]"),
        ({"page": 15}, r"block_table must hold page ids in \[0, 15\) .* got 15 at \[2, 0\]"),
    ],
)
def test_a_bad_row_leaves_every_buffer_as_it_was(device, change, message):
    if device != "cpu":
        pytest.skip("a GPU's rows are checked by the kernel")
    args = valid(device)
    args |= {n: int32(values, device) for n, values in change.items() if n != "page"}
    if "page" in change:
        args["block_table"][2, 0] = change["page"]
    before = args["k_cache"].clone(), args["v_cache"].clone()
    with pytest.raises(ValueError, match=message):
        streaming_decode(**args)
    assert torch.equal(args["k_cache"], before[0])
    assert torch.equal(args["v_cache"], before[1])


@pytest.mark.parametrize("mass_n_recent", [-1, 4])
@pytest.mark.parametrize("paged", [False, True])
def test_opcheck(device, mass_n_recent, paged):
    args = valid(device) | {"mass_n_recent": mass_n_recent}
    if not paged:
        args["block_table"] = None
        args["k_cache"], args["v_cache"] = torch.zeros(2, 3, 40, 2, 16, dtype=torch.float16, device=device)
    positional = [args.pop(n) for n in ("q", "k", "v", "k_cache", "v_cache", "seq_len")]
    torch.library.opcheck(torch.ops.lighttransfer.streaming_decode.default, tuple(positional), args)


def test_compiles_without_a_graph_break(device):
    args = valid(device) | {"mass_n_recent": 4}

    def step(x, **kwargs):
        out, lse, mass = streaming_decode(x * 2, **kwargs)
        return out + 1, lse, mass

    q = args.pop("q")
    eager = {n: a.clone() if n.endswith("cache") else a for n, a in args.items()}
    want = step(q, **eager)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, **args)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(args["k_cache"], eager["k_cache"])
    assert torch.equal(args["v_cache"], eager["v_cache"])
