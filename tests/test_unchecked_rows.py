"""What CUDA kernels do where no host can check a row's values first: a bad row harms nothing and nobody else.

On the CPU the same values raise errors before anything is written (test_decode.py, test_kv.py, ...). Here the simulator
leaves those checks out, as a GPU must, and reports any access out of bounds.
"""

from __future__ import annotations

import pytest
import torch
from reference import attention

from lighttransfer import _library
from lighttransfer.ops import (
    append_kv_,
    compact_kv_,
    gather_kv,
    lazy_ratio,
    prefill_attn,
    prefill_attn_lazy,
    retained_mass,
    streaming_decode,
)

FP16 = torch.float16


@pytest.fixture
def gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device fixture on a GPU's backends, rows unchecked."""
    if device == "cpu" and _library.namespace == "lighttransfer":
        pytest.skip("the CPU's ops check every row before they run")
    monkeypatch.setenv("LIGHTTRANSFER_SIM_UNCHECKED_ROWS", "1")
    return device


def _random(*shape: int, seed: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(FP16).to(device)


def _int32(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Decode:
    """Three rows over pages of their own, 320 slots each; the middle one is made bad."""

    def __init__(self, device: str, page_size: int) -> None:
        self.device, n_pages = device, 3 * 320 // page_size
        self.cache = _random(2, n_pages, page_size, 2, 64, seed=1, device=device)
        self.pages = torch.arange(n_pages).flip(0).reshape(3, -1)
        self.table = self.pages.int().to(device)
        self.q, self.k, self.v = (_random(3, 1, heads, 64, seed=heads + 5, device=device) for heads in (4, 2, 2))
        self.seq_len, self.n_recent = [250, 299, 4000], [0, 0, 100]

    def run(self) -> tuple[torch.Tensor, ...]:
        cache = self.cache.clone()
        lengths, n_recent = _int32(self.seq_len, self.device), _int32(self.n_recent, self.device)
        window = {"n_sink": 4, "n_recent": n_recent, "mass_n_recent": 20, "block_table": self.table}
        return (*streaming_decode(self.q, self.k, self.v, *cache, lengths, **window), cache)

    def expect_row_1(self, out: torch.Tensor, lse: torch.Tensor, slots: slice) -> None:
        """Row 1 has attended these slots, as they were, and the new token."""
        cached = self.cache.cpu()[:, self.pages[1]].flatten(1, 2)[:, slots]
        k, v = torch.cat([cached, torch.stack([self.k[1], self.v[1]]).cpu()], 1).unsqueeze(1)
        want_out, want_lse = attention(self.q[1:2].cpu(), k, v, causal=False)
        torch.testing.assert_close(out[1].cpu().double(), want_out[0], atol=1e-3, rtol=0)
        torch.testing.assert_close(lse[1].cpu().double(), want_lse[0], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("bad_page", [-1, 10_000])
def test_decode_hides_keys_of_pages_that_are_none(gpu: str, page_size: int, bad_page: int) -> None:
    step = Decode(gpu, page_size)
    good = step.run()
    step.table[1, : 64 // page_size] = bad_page
    out, lse, mass, cache = step.run()
    for got, want in zip((out, lse, mass), good, strict=False):
        assert torch.equal(got[[0, 2]], want[[0, 2]])
    assert torch.equal(cache, good[-1])  # the new tokens were stored, and nothing else
    step.expect_row_1(out, lse, slice(64, 299))


@pytest.mark.parametrize("bad_page", [-1, 15])
def test_decode_does_not_store_a_token_on_no_page(gpu: str, bad_page: int) -> None:
    step = Decode(gpu, 64)
    step.table[1, 4] = bad_page  # where the new token would go: it is attended all the same
    out, lse, _, cache = step.run()
    assert ((cache != step.cache).any(-1).sum(dim=(1, 2, 3)) == 2 * 2).all()  # two rows' tokens, two heads each
    step.expect_row_1(out, lse, slice(0, 256))


@pytest.mark.parametrize("length", [320, 5_000, 2**31 - 1])
def test_decode_does_not_store_a_token_beyond_the_cache(gpu: str, length: int) -> None:
    step = Decode(gpu, 64)
    good = step.run()
    step.seq_len[1] = length
    got = step.run()
    for ours, want in zip(got[:3], good, strict=False):
        assert torch.equal(ours[[0, 2]], want[[0, 2]])
        assert ours.isfinite().all()
    assert ((got[-1] != step.cache).any(-1).sum(dim=(1, 2, 3)) == 2 * 2).all()


@pytest.mark.parametrize("n_recent", [-1, -4, -7, -(2**31)])
def test_decode_keeps_a_negative_ring_to_itself(gpu: str, n_recent: int) -> None:
    """Its own row is a full one, or, where n_sink + n_recent >= 0, one of that many slots; nothing else is touched."""
    step = Decode(gpu, 64)
    good = step.run()
    step.n_recent[1] = n_recent
    got = step.run()
    for ours, want in zip(got[:3], good, strict=False):
        assert torch.equal(ours[[0, 2]], want[[0, 2]])
        assert not ours.isnan().any()
        assert n_recent + 4 >= 0 or torch.equal(ours, want)
    touched = (got[-1] != good[-1]).any(-1).any(-1)  # [2, n_pages, page_size]
    touched[:, step.pages[1, 4], 43] = False  # the new token's place, slot 299
    assert not touched.any()


def _kv(device: str):
    cache = _random(2, 12, 8, 2, 16, seed=1, device=device)
    table = torch.arange(12, dtype=torch.int32, device=device).reshape(3, 4)
    return cache, table


@pytest.mark.parametrize("change", ["page", "no page", "capacity", "start", "negative start", "ring", "far ring"])
def test_append_skips_what_has_no_place(gpu: str, change: str) -> None:
    (k_cache, v_cache), table = _kv(gpu)
    k, v = (_random(3, 6, 2, 16, seed=seed, device=gpu) for seed in (5, 6))
    lengths, n_recent, starts = [10, 20, 3], [0, 0, 8], [0, 0, 2]

    def run() -> torch.Tensor:
        caches = k_cache.clone(), v_cache.clone()
        rows = {"n_recent": _int32(n_recent, gpu), "seq_start": _int32(starts, gpu)}
        append_kv_(*caches, k, v, _int32(lengths, gpu), n_sink=2, block_table=table, **rows)
        return torch.stack(caches)

    before = torch.stack([k_cache, v_cache])
    want = run()
    if change in ("page", "no page"):
        table[1, 2] = -1 if change == "page" else 12  # of slots 16 to 23: positions 24 and 25 are stored
        want[:, 4:8] = before[:, 4:8]
        want[:, 7, :2] = torch.stack([k, v])[:, 1, 4:6]
    elif change == "capacity":
        lengths[1] = 28  # 28 to 31 fit
        want[:, 4:8] = before[:, 4:8]
        want[:, 7, 4:] = torch.stack([k, v])[:, 1, :4]
    elif change in ("start", "negative start"):
        starts[1] = 77 if change == "start" else -2
        want[:, 4:8] = before[:, 4:8]
    elif change == "far ring":
        n_recent[1], lengths[1] = -(2**31), 2**31 - 1  # a full row, far beyond the cache
        want[:, 4:8] = before[:, 4:8]
    else:
        n_recent[1] = -3  # a full row
    assert torch.equal(run(), want)


def test_compact_skips_rows_that_are_none(gpu: str) -> None:
    (k_cache, v_cache), table = _kv(gpu)
    before = torch.stack([k_cache, v_cache])
    want = before.clone()
    lengths = _int32([30, 30, 30], gpu)
    window = {"n_sink": 2, "n_recent": 6, "block_table": table}
    compact_kv_(*want, lengths, rows=_int32([1], gpu), **window)
    got = before.clone()
    compact_kv_(*got, lengths, rows=_int32([-1, 1, 3, 2**31 - 1], gpu), **window)
    assert torch.equal(got, want)
    got = before.clone()
    compact_kv_(*got, _int32([30, 2**31 - 1, 30], gpu), rows=_int32([1], gpu), **window)  # beyond the cache
    assert torch.equal(got, before)


@pytest.mark.parametrize("bad_page", [-1, 12])
@pytest.mark.parametrize("place", [0, 3])  # of the slots that tokens move to, and that they come from
def test_compact_moves_nothing_to_or_from_no_page(gpu: str, place: int, bad_page: int) -> None:
    (k_cache, v_cache), table = _kv(gpu)
    before = torch.stack([k_cache, v_cache])
    table[1, place] = bad_page
    got = before.clone()
    window = {"n_sink": 2, "n_recent": 6, "block_table": table}
    compact_kv_(*got, _int32([30, 30, 30], gpu), rows=_int32([1], gpu), **window)
    assert torch.equal(got, before)


@pytest.mark.parametrize("bad_page", [-1, 12])
def test_gather_leaves_zeros_for_what_is_none(gpu: str, bad_page: int) -> None:
    (k_cache, v_cache), table = _kv(gpu)
    table[1, 0] = bad_page
    lengths, n_recent = _int32([5, 20, 400], gpu), _int32([0, 0, 0], gpu)
    k, v, start = gather_kv(k_cache, v_cache, lengths, n_sink=2, n_recent=n_recent, max_len=24, block_table=table)
    assert start.tolist() == [19, 4, 0]
    for got, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(got[0, 19:], cache[0, :5])
        assert (got[1, 4:12] == 0).all()
        assert torch.equal(got[1, 12:], torch.cat([cache[5], cache[6, :4]]))
        assert (got[2] == 0).all() or got[2].isfinite().all()


@pytest.mark.parametrize("start", [-5, 41, 2**31 - 1])
def test_prefill_takes_the_nearest_start(gpu: str, start: int) -> None:
    q, k, v = (_random(3, 40, heads, 64, seed=heads, device=gpu) for heads in (4, 2, 2))
    window = {"n_sink": 2, "n_recent": 8}

    def run(middle: int) -> list[torch.Tensor]:
        starts = _int32([0, middle, 7], gpu)
        lse = torch.full((3, 4, 40), 5.0, device=gpu)
        masses = retained_mass(q[:, -9:], k, lse[..., -9:], seq_start=starts, **window)
        return [
            *prefill_attn(q, k, v, seq_start=starts),
            *prefill_attn(q, k, v, seq_start=starts, **window),
            *prefill_attn_lazy(q, k, v, n_last=9, seq_start=starts, **window),
            masses,
        ]

    for got, want in zip(run(start), run(min(max(start, 0), 40)), strict=True):
        assert torch.equal(got, want)


def test_lazy_ratio_takes_the_nearest_count(gpu: str) -> None:
    mass = torch.rand(3, 4, 8, 2, generator=torch.Generator().manual_seed(0)).to(gpu)
    want = lazy_ratio(mass, n_queries=_int32([8, 0, 3], gpu))
    assert torch.equal(lazy_ratio(mass, n_queries=_int32([9, -2, 3], gpu)), want)
