"""prefill_attn where scores differ much from one part of the keys to another: a softmax that looks for its maxima only
now and then has to notice."""

from __future__ import annotations

import pytest
import torch
from reference import assert_matches, attention, kept_mass, random_qkv

from lighttransfer.ops import prefill_attn, prefill_attn_lazy

BF16, FP16 = torch.bfloat16, torch.float16
BLOCK = 64  # keys of one level

#: Levels of the keys' scores, natural units, from left to right; kernels may walk them either way.
LEVELS = {
    "rising": [4 * i for i in range(14)],
    "falling": [4 * i for i in reversed(range(14))],
    "leap of 2^14": [0] * 3 + [10] * 11,
    "leap back": [10] * 3 + [0] * 11,
    "beyond fp16": [14, 0, 0, 0, 13, 0, 0, 12, *[0] * 6],
    "beyond 2^64 twice": [95, 0, 0, 48, *[0] * 10],
    "beyond fp32": [0, 0, 200, *[0] * 11],
    "low to the right": [0] * 10 + [-200] * 4,
    "low to the left": [-200] * 10 + [0] * 4,
}


def _levelled(levels: list[int], n_queries: int, head_dim: int, dtype: torch.dtype, device: str, sink: int = 0):
    """Queries and keys whose scores are those of random ones plus their key's level, and ``sink`` for the first four
    keys: one column of q and k holds the level. Rows lie at several levels' ends, where causal masks cut."""
    q, k, v = random_qkv(2, n_queries, BLOCK * len(levels) - 30, 2, 1, head_dim, dtype, device)
    level = torch.tensor(levels).repeat_interleave(BLOCK)[30:].clone()
    level[:4] += sink
    q[..., 5] = 8
    k[..., 5] = (level * head_dim**0.5 / 8)[:, None].to(dtype).to(device)
    return q, k, v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_levels(device, levels, dtype, causal):
    q, k, v = _levelled(levels, 150, 64, dtype, device)
    assert_matches(prefill_attn(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize("levels", [LEVELS["beyond fp16"], LEVELS["beyond 2^64 twice"]])
def test_levels_of_other_head_dims(device, levels, head_dim, dtype):
    q, k, v = _levelled(levels, 40, head_dim, dtype, device)
    assert_matches(prefill_attn(q, k, v), q, k, v)


@pytest.mark.parametrize("sink", [8, 20, 60])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_sinks(device, dtype, sink):
    """The first keys have by far the largest scores, as in real models."""
    q, k, v = _levelled([0] * 10, 200, 64, dtype, device, sink)
    assert_matches(prefill_attn(q, k, v), q, k, v)
    assert_matches(prefill_attn(q, k, v, n_sink=4, n_recent=300), q, k, v, n_sink=4, n_recent=300)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_long_rows_of_equal_scores(device, dtype):
    """A sum that grows by its length alone, until weights are a thousandth of the sum: none may fall out of fp16."""
    n_keys = 20_000
    q, k, v = random_qkv(1, 3, n_keys, 2, 1, 64, dtype, device)
    v += 1
    out, lse = prefill_attn(q * 0.01, k, v, causal=False)
    want, want_lse = attention(q * 0.01, k, v, causal=False)
    plain_lse = attention(q * 0.01, k, v, causal=False, dtype=torch.float32)[1]
    assert (lse - want_lse).abs().max() <= max(2e-6, 2 * (plain_lse - want_lse).abs().max())
    torch.testing.assert_close(out.double(), want, atol=0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("levels", [LEVELS["beyond fp16"], LEVELS["beyond 2^64 twice"], LEVELS["rising"]])
def test_masses(device, levels, dtype):
    """The sums of three ranges of keys, one after the other, under levels that change within them. On the CPU they are
    made from scores and an LSE of fp32, whose two roundings grow with them."""
    window = {"n_sink": 70, "n_recent": 300, "n_last": 32}
    q, k, v = _levelled(levels, 150, 64, dtype, device, sink=6)
    out, lse, mass = prefill_attn_lazy(q, k, v, **window)
    assert_matches((out, lse), q, k, v)
    want = kept_mass(q, k, **window)
    plain = kept_mass(q, k, **window, dtype=torch.float32)
    rounding = 2 * torch.finfo(torch.float32).eps * lse.abs().max()
    assert (mass - want).abs().max() <= 2 * max(1e-6, rounding, (plain - want).abs().max())


@pytest.mark.parametrize(("dtype", "value"), [(FP16, torch.inf), (BF16, torch.inf), (BF16, 3e38)])
def test_infinite_scores_stay_within_their_rows(device, dtype, value):
    """A row with scores of +inf comes out NaN, as from a plain softmax, and the others as if there were none."""
    q, k, v = _levelled([0] * 14, 150, 64, dtype, device)
    q[..., 6] = 0
    q[:, 70, :, 6] = value
    k[..., 6] = 0 if value == 3e38 else 1
    k[:, 100, :, 6] = min(value, torch.finfo(dtype).max)  # products beyond fp32
    out, lse = prefill_attn(q, k, v, causal=False)
    assert out[:, 70].isnan().all()
    others = torch.arange(150, device=q.device) != 70
    k[..., 6] = 0
    assert_matches((out[:, others], lse[..., others]), q[:, others], k, v, causal=False)
