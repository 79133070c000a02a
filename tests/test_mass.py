"""retained_mass and lazy_ratio against fp64 softmax and literal 0/1 masks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lighttransfer.ops import lazy_ratio, retained_mass


def _inputs(batch, n_queries, n_keys, heads, kv_heads, dim, dtype, device, seed=0):
    """Queries, keys with strides that are no one's contiguous ones."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch + 1, heads + 1, n_queries + 3, dim + 8, generator=g)
    k = torch.randn(n_keys + 1, batch, kv_heads + 2, dim + 16, generator=g)
    q = (q.to(dtype).to(device)[1:, :heads, 3:, :dim]).transpose(1, 2)
    k = (k.to(dtype).to(device)[1:, :, 2:, 16:]).transpose(0, 1)
    assert q.shape == (batch, n_queries, heads, dim)
    assert k.shape == (batch, n_keys, kv_heads, dim)
    return q, k


def _reference(q, k, *, n_sink, n_recent, scale=None, seq_start=None, dtype=torch.float64, lse=None):
    """Mass and lse from whole rows of scores and 0/1 masks over positions."""
    batch, n_queries, heads, dim = q.shape
    n_keys = k.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), k.to(dtype).repeat_interleave(heads // k.shape[2], 2))
    scores = scores * (dim**-0.5 if scale is None else scale)
    start = torch.zeros(batch, 1, 1, 1) if seq_start is None else seq_start[:, None, None, None]
    position = torch.arange(n_keys) - start.cpu()  # [B, 1, 1, S_k], of the keys
    query = (torch.arange(n_queries) + n_keys - n_queries)[:, None] - start.cpu()  # [B, 1, S_q, 1]
    visible = ((position >= 0) & (position <= query)).to(q.device)
    sink = (position < n_sink).to(q.device)
    kept = (position >= n_keys - start.cpu() - n_recent).to(q.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    if lse is None:
        lse = torch.logsumexp(scores, -1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.stack([(p * sink).sum(-1), (p * (kept & ~sink)).sum(-1)], -1), lse


def _check(q, k, **window):
    want, lse = _reference(q, k, **window)
    lse = lse.float()
    plain, _ = _reference(q, k, **window, dtype=torch.float32, lse=lse)
    got = retained_mass(q, k, lse, **window)
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    error = (plain.double() - want).abs().max().item()
    assert error < 1e-4  # the yardstick itself
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2 * error + 1e-7)
    return got, lse


def test_inputs_off_any_alignment(device):
    q, k = _inputs(3, 7, 150, 4, 2, 64, torch.float16, device)
    q, k = (t.new_empty(*t.shape[:-1], t.shape[-1] + 1)[..., 1:].copy_(t) for t in (q, k))
    _check(q, k, n_sink=4, n_recent=20)


def _dtypes():
    return [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 8, 24, 72, 200])
def test_equals_fp64(device, dtype, heads, kv_heads, dim):
    q, k = _inputs(3, 7, 150, heads, kv_heads, dim, dtype, device)
    _check(q, k, n_sink=4, n_recent=75)


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "n_sink", "n_recent"),
    [
        (32, 300, 4, 200),
        (33, 300, 0, 64),  # no sinks
        (5, 300, 70, 0),  # sinks alone, more than a tile
        (5, 300, 0, 0),
        (64, 200, 17, 3),  # most queries stand before the recent part
        (1, 129, 1, 128),  # exactly the window
        (7, 50, 4, 1020),  # inside the window
        (3, 10, 20, 5),  # inside the sinks
        (9, 9, 2, 4),
        (1, 1, 4, 4),
        (12, 7, 2, 3),  # more queries than keys: the leading ones see nothing
    ],
)
def test_windows(device, dtype, n_queries, n_keys, n_sink, n_recent):
    q, k = _inputs(3, n_queries, n_keys, 6, 2, 40, dtype, device, seed=1)
    got, _ = _check(q, k, n_sink=n_sink, n_recent=n_recent)
    if n_queries > n_keys:
        assert (got[:, :, : n_queries - n_keys] == 0).all()


@pytest.mark.parametrize("dtype", _dtypes())
def test_left_padded_rows(device, dtype):
    q, k = _inputs(5, 8, 120, 6, 3, 64, dtype, device, seed=2)
    start = torch.tensor([0, 50, 117, 119, 120], dtype=torch.int32, device=device)  # rows 2 to 4: fewer than 8 queries
    got, _ = _check(q, k, n_sink=3, n_recent=40, seq_start=start)
    assert (got[4] == 0).all()
    assert (got[2, :, :5] == 0).all()
    assert (got[2, :, 5:] > 0).any()
    lse = _reference(q, k, n_sink=3, n_recent=40, seq_start=start)[1].float()
    alone = retained_mass(q[1:2], k[1:2, 50:], lse[1:2], n_sink=3, n_recent=40)
    assert torch.equal(alone, got[1:2])


def test_a_prompt_inside_the_window_keeps_everything(device):
    q, k = _inputs(3, 20, 60, 4, 2, 64, torch.bfloat16, device, seed=3)
    _, lse = _reference(q, k, n_sink=4, n_recent=56)
    for n_recent in (56, 57, 1000):
        mass = retained_mass(q, k, lse.float(), n_sink=4, n_recent=n_recent)
        torch.testing.assert_close(mass.sum(-1), torch.ones(3, 4, 20, device=device), rtol=0, atol=4e-6)
        ratio = lazy_ratio(mass)
        torch.testing.assert_close(ratio, torch.ones(3, device=device), rtol=0, atol=4e-6)
    short = lazy_ratio(retained_mass(q, k, lse.float(), n_sink=4, n_recent=30))
    assert (short < 0.9).all()


def test_mass_is_a_probability_even_of_peaked_attention(device):
    """Scores far apart, and sinks that overlap the recent part: counted once, never above 1."""
    q, k = _inputs(3, 32, 100, 4, 2, 64, torch.float16, device, seed=4)
    q = q * 8
    for n_sink, n_recent in ((4, 100), (60, 60), (100, 100), (0, 99)):
        got, lse = _check(q, k, n_sink=n_sink, n_recent=n_recent)
        assert got.min() >= 0
        rounding = 4 * torch.finfo(torch.float32).eps * lse.abs().max()  # of an exponent as large as the lse
        assert got.sum(-1).max() <= 1 + rounding


def test_scale_is_the_softmax_scale(device):
    q, k = _inputs(3, 4, 90, 4, 2, 64, torch.float16, device, seed=5)
    for scale in (0.03, 0.5, 3.0):
        _check(q, k, n_sink=4, n_recent=20, scale=scale)


def test_a_row_alone_equals_the_row_in_a_batch(device):
    """Bit for bit, however the work is split over threads."""
    q, k = _inputs(3, 32, 500, 9, 3, 64, torch.bfloat16, device, seed=6)
    lse = _reference(q, k, n_sink=4, n_recent=400)[1].float()
    together = retained_mass(q, k, lse, n_sink=4, n_recent=400)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for b in range(3):
                row = slice(b, b + 1)
                assert torch.equal(retained_mass(q[row], k[row], lse[row], n_sink=4, n_recent=400), together[row])
    finally:
        torch.set_num_threads(threads)


def test_strided_lse(device):
    q, k = _inputs(3, 6, 80, 4, 2, 64, torch.float16, device, seed=7)
    lse = _reference(q, k, n_sink=2, n_recent=9)[1].float()
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(
        retained_mass(q, k, strided, n_sink=2, n_recent=9), retained_mass(q, k, lse, n_sink=2, n_recent=9)
    )


def test_non_finite_values_stay_in_their_rows(device):
    q, k = _inputs(3, 5, 80, 4, 2, 64, torch.float16, device, seed=8)
    lse = _reference(q, k, n_sink=2, n_recent=30)[1].float()
    clean = retained_mass(q, k, lse, n_sink=2, n_recent=30)
    dirty = k.clone()
    dirty[0, 40] = torch.nan  # an evicted key
    dirty[1, -1] = torch.nan  # seen by the last query alone
    dirty[2, 1, 0] = torch.inf  # a sink of KV head 0
    lse[2, 3, 0] = -torch.inf  # a query that attends to nothing
    got = retained_mass(q, dirty, lse, n_sink=2, n_recent=30)
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[1, :, :-1], clean[1, :, :-1])
    assert got[1, :, -1, 1].isnan().all()
    assert torch.equal(got[1, :, -1, 0], clean[1, :, -1, 0])
    assert not got[2, :2, :, 0].isfinite().all()
    assert torch.equal(got[2, 2:, 1:], clean[2, 2:, 1:])
    assert (got[2, 3, 0] == 0).all()


@pytest.mark.parametrize("n_queries", [None, [0, 1, 5]])
def test_lazy_ratio_is_the_mean_probability(device, n_queries):
    g = torch.Generator().manual_seed(0)
    mass = torch.rand(3, 7, 5, 2, generator=g).to(device) / 2
    counts = n_queries or [5, 5, 5]
    want = [mass[b, :, 5 - n :].double().sum(-1).mean() if n else torch.tensor(1.0) for b, n in enumerate(counts)]
    tensor = torch.tensor(n_queries, dtype=torch.int32, device=device) if n_queries else None
    got = lazy_ratio(mass, n_queries=tensor)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.stack(want).double().to(device), rtol=1e-6, atol=0)


def test_lazy_ratio_reads_only_real_queries(device):
    mass = torch.full((1, 2, 4, 2), torch.nan, device=device)
    mass[:, :, 2:] = 0.25
    assert lazy_ratio(mass, n_queries=torch.tensor([2], dtype=torch.int32, device=device)).item() == 0.5


def test_empty_sizes(device):
    half = {"dtype": torch.float16, "device": device}
    for b, sq, sk, h, hkv in [(0, 2, 5, 4, 2), (2, 0, 5, 4, 2), (2, 2, 0, 4, 2), (2, 2, 5, 0, 0)]:
        q, k = torch.ones(b, sq, h, 64, **half), torch.ones(b, sk, hkv, 64, **half)
        mass = retained_mass(q, k, torch.zeros(b, h, sq, device=device), n_sink=1, n_recent=2)
        assert mass.shape == (b, h, sq, 2)
        if sk == 0:
            assert (mass == 0).all()
        assert (lazy_ratio(mass) == (0 if sk == 0 else 1)).all()


def test_opcheck(device):
    q, k = _inputs(3, 5, 80, 4, 2, 64, torch.float16, device)
    lse = _reference(q, k, n_sink=2, n_recent=9)[1].float()
    start = torch.tensor([0, 3, 80], dtype=torch.int32, device=device)
    window = {"n_sink": 2, "n_recent": 9}
    torch.library.opcheck(torch.ops.lighttransfer.retained_mass.default, (q, k, lse), window)
    torch.library.opcheck(
        torch.ops.lighttransfer.retained_mass.default, (q, k, lse), {**window, "scale": 0.1, "seq_start": start}
    )
    mass = retained_mass(q, k, lse, **window)
    torch.library.opcheck(torch.ops.lighttransfer.lazy_ratio.default, (mass,))
    counts = torch.tensor([0, 1, 5], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.lighttransfer.lazy_ratio.default, (mass,), {"n_queries": counts})


def test_compiles_without_graph_breaks(device):
    def score(q, k, lse):
        return lazy_ratio(retained_mass(q, k, lse, n_sink=2, n_recent=9)) * 2

    q, k = _inputs(3, 5, 80, 4, 2, 64, torch.float16, device)
    lse = _reference(q, k, n_sink=2, n_recent=9)[1].float()
    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, lse), score(q, k, lse))


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_narrower_instruction_sets(isa):
    """The kernels of other CPUs, in a process that is told to use them."""
    if os.environ.get("LIGHTTRANSFER_CPU_ISA"):
        pytest.skip("already running under a chosen instruction set")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "windows or padded or non_finite", __file__],
        env={**os.environ, "LIGHTTRANSFER_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
