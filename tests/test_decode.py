"""streaming_decode against a Python list of (position, k, v) and a float64 softmax."""

from __future__ import annotations

import pytest
import torch
from decode_cases import Comparison, check_step, filled, inputs, int32, ring_slot, valid

from lighttransfer import _library
from lighttransfer.ops import streaming_decode

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Rows: inactive; first token; ring not full, exactly full (before and after the token), wrapped once and often, also
# one key short of a warp's 32; full rows shorter and longer than one split.
LENGTHS = [-1, -(2**31), 0, 5, 35, 36, 37, 200, 200, 63, 64, 300, 530]
N_RECENTS = [32, 0, 32, 32, 32, 32, 32, 32, 59, 0, 0, 0, 0]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(70, 1, 16), (20, 20, 64), (20, 10, 120)])
def test_more_heads_than_are_walked_together(device, dtype, heads):
    """A CPU walks 16 blocks of query heads and 4 KB of a slot at a time; the last walk is a shorter one."""
    n_heads, n_kv_heads, head_dim = heads
    lengths, n_recents = [34, 9, 30], [0, 16, 0]
    cache, oracles = filled(lengths, n_recents, 3, 70, n_kv_heads, head_dim, dtype, device, 32)
    check_step(*inputs(3, n_heads, n_kv_heads, head_dim, dtype), lengths, cache, oracles, 3, device, 8)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 65, 66])
def test_an_infinite_value_of_the_last_key(device, dtype, length):
    """What fills up a tile behind its last key has a weight of 0 and must be 0 itself."""
    cache, _ = filled([length - 1], [0], 4, 80, 1, 24, dtype, device)
    q, k, v = (x.to(device) for x in inputs(1, 3, 1, 24, dtype))
    v[..., 5], v[..., 20] = torch.inf, -torch.inf
    out, _, _ = streaming_decode(
        q, k, v, cache.k, cache.v, int32([length - 1], device), n_sink=4, n_recent=int32([0], device)
    )
    assert (out[..., 5] == torch.inf).all()
    assert (out[..., 20] == -torch.inf).all()
    assert out.isfinite().sum() == 3 * 22


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
