"""Every op on random and on nonsense arguments: a right result or a Python error, and then no buffer has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import slow_ops
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lighttransfer import ops

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INTS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 40, 2**31 - 1, 2**31, 2**62, 2**63 - 1]
INT32S = [value for value in INTS if -(2**31) <= value < 2**31]


# ---- arguments


def _laid_out(r: Random, values: Tensor) -> Tensor:
    """The same values with other strides and another offset; the last dimension keeps its unit stride."""
    order = list(range(values.dim() - 1))
    r.shuffle(order)
    sizes = [values.shape[d] + r.randint(0, 2) for d in order] + [values.shape[-1] + r.choice([0, 0, 8])]
    base = torch.full(sizes, 0.5).to(values.dtype)
    back = [order.index(d) for d in range(values.dim() - 1)] + [values.dim() - 1]
    view = base.permute(back)[tuple(slice(base_size - size, base_size) for base_size, size in zip(
        (base.permute(back)).shape, values.shape, strict=True))]  # fmt: skip
    view.copy_(values)
    return view


def _floats(r: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(r.randint(0, 99)))
    return _laid_out(r, values.clamp(-3, 3).to(dtype))


def _i32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _sizes(r: Random) -> tuple[int, int, int, int, torch.dtype]:
    """B, H_q, H_kv, D, dtype."""
    kv_heads = r.choice([1, 2, 3])
    return r.choice([0, 1, 2, 3]), kv_heads * r.choice([1, 3]), kv_heads, r.choice([8, 24, 64, 72]), r.choice(FLOATS)


def _cache(r: Random, batch: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """A cache of 6 to 12 slots a row, with rows of every kind that fit it."""
    n_sink, page_size, per_row = r.randint(0, 3), r.randint(2, 4), 3
    capacity = page_size * per_row
    rings = [r.choice([0, r.randint(1, capacity - n_sink)]) if capacity > n_sink else 0 for _ in range(batch)]
    arguments: dict[str, Any] = {
        "seq_len": _i32([r.choice([-1, r.randint(0, 50 if ring else capacity - 4)]) for ring in rings]),
        "n_sink": n_sink,
        "n_recent": _i32(rings),
    }
    shape = (batch, capacity, heads, dim)
    if r.random() < 0.6:
        pages = list(range(batch * per_row + 1))
        r.shuffle(pages)
        arguments["block_table"] = torch.tensor(pages[:-1], dtype=torch.int32).reshape(batch, per_row)
        shape = (len(pages), page_size, heads, dim)
    for name in ("k_cache", "v_cache"):
        arguments[name] = _floats(r, shape, dtype)
    return arguments


def _append(r: Random) -> dict[str, Any]:
    batch, _, heads, dim, dtype = _sizes(r)
    tokens = r.randint(0, 4)
    arguments = _cache(r, batch, heads, dim, dtype)
    arguments |= {name: _floats(r, (batch, tokens, heads, dim), dtype) for name in ("k", "v")}
    if r.random() < 0.5:
        arguments["seq_start"] = _i32([r.randint(0, tokens) for _ in range(batch)])
    return arguments


def _compact(r: Random) -> dict[str, Any]:
    batch, _, heads, dim, dtype = _sizes(r)
    arguments = _cache(r, batch, heads, dim, dtype)
    arguments |= {"seq_len": _i32([r.randint(-1, 6) for _ in range(batch)]), "n_recent": r.randint(1, 4)}
    if r.random() < 0.5:
        arguments["rows"] = _i32(r.sample(range(batch), r.randint(0, batch)))
    return arguments


def _gather(r: Random) -> dict[str, Any]:
    batch, _, heads, dim, dtype = _sizes(r)
    return _cache(r, batch, heads, dim, dtype) | {"max_len": r.randint(12, 20)}


def _decode(r: Random) -> dict[str, Any]:
    batch, q_heads, heads, dim, dtype = _sizes(r)
    arguments = _cache(r, batch, heads, dim, dtype) | {"q": _floats(r, (batch, 1, q_heads, dim), dtype)}
    return arguments | {name: _floats(r, (batch, 1, heads, dim), dtype) for name in ("k", "v")} | {
        "mass_n_recent": r.choice([-1, 0, 3]), "scale": r.choice([None, 0.3])}  # fmt: skip


def _prefill(r: Random) -> dict[str, Any]:
    batch, q_heads, heads, dim, dtype = _sizes(r)
    n_queries, n_keys = r.randint(0, 9), r.randint(0, 12)
    arguments = {"q": _floats(r, (batch, n_queries, q_heads, dim), dtype), "scale": r.choice([None, 0.3])}
    arguments |= {name: _floats(r, (batch, n_keys, heads, dim), dtype) for name in ("k", "v")}
    if r.random() < 0.5:
        arguments["seq_start"] = _i32([r.randint(0, n_keys) for _ in range(batch)])
    return arguments


def _prefill_masked(r: Random) -> dict[str, Any]:
    return _prefill(r) | r.choice([{}, {"causal": False}, {"n_sink": r.randint(0, 3), "n_recent": r.randint(-1, 5)}])


def _prefill_lazy(r: Random) -> dict[str, Any]:
    return _prefill(r) | {"n_sink": r.randint(0, 3), "n_recent": r.randint(0, 5), "n_last": r.randint(1, 7)}


def _mass(r: Random) -> dict[str, Any]:
    arguments = _prefill(r)
    q = arguments["q_last"] = arguments.pop("q")
    del arguments["v"]
    lse = _floats(r, (q.shape[0], q.shape[2], q.shape[1]), torch.float32).add_(3.0)
    return arguments | {"lse_last": lse, "n_sink": r.randint(0, 3), "n_recent": r.randint(0, 5)}


def _ratio(r: Random) -> dict[str, Any]:
    batch, heads, n_last = r.randint(0, 3), r.randint(0, 3), r.randint(0, 5)
    arguments: dict[str, Any] = {"mass": _floats(r, (batch, heads, n_last, 2), torch.float32).contiguous()}
    if r.random() < 0.5:
        arguments["n_queries"] = _i32([r.randint(0, n_last) for _ in range(batch)])
    return arguments


def _merge(r: Random) -> dict[str, Any]:
    batch, heads, _, dim, dtype = _sizes(r)
    tokens = r.randint(0, 5)
    arguments = {name: _floats(r, (batch, tokens, heads, dim), dtype) for name in ("out_a", "out_b")}
    for out, lse in (("out_a", "lse_a"), ("out_b", "lse_b")):
        arguments[lse] = _floats(r, (batch, heads, tokens), torch.float32)
        empty = torch.tensor([r.random() < 0.2 for _ in range(arguments[lse].numel())], dtype=torch.bool)
        arguments[lse].masked_fill_(empty.view(batch, heads, tokens), -torch.inf)
        arguments[out].masked_fill_(empty.view(batch, heads, tokens).transpose(1, 2)[..., None], 0.0)
    return arguments


# ---- nonsense


def _spoil(r: Random, arguments: dict[str, Any]) -> None:
    name = r.choice(sorted(arguments))
    value = arguments[name]
    if r.random() < 0.1:
        arguments[name] = r.choice([None, "seven", 1.5, [1, 2]])
    elif isinstance(value, Tensor) and value.dtype == torch.int32 and value.numel() and r.random() < 0.7:
        arguments[name] = value.clone()
        arguments[name][tuple(r.randrange(size) for size in value.shape)] = r.choice(INT32S)
    elif isinstance(value, Tensor):
        arguments[name] = _spoiled_tensor(r, value)
    elif isinstance(value, bool):
        arguments[name] = not value
    elif isinstance(value, int):
        # An output of gigabytes would be right, but take the machine's memory.
        large = ("max_len", "n_last")
        arguments[name] = r.choice([i for i in INTS if name not in large or i < 100 or i >= 2**62])
    else:
        arguments[name] = r.choice([math.nan, math.inf, 0.0, -1.0, 1e-30, 1e38, 1e300])


def _spoiled_tensor(r: Random, t: Tensor) -> Tensor:
    kinds = ["dtype", "slice", "drop", "add", "expand", "transpose", "values"]
    kind, d = r.choice(kinds), r.randrange(t.dim()) if t.dim() else 0
    if kind == "dtype":
        return t.to(r.choice([*FLOATS, torch.float64, torch.int32, torch.int64, torch.bool, torch.complex64]))
    if kind == "values" and t.is_floating_point() and t.numel():
        t = t.clone()
        t[tuple(r.randrange(size) for size in t.shape)] = r.choice([math.nan, math.inf, -math.inf, 6e4, -0.0])
        return t
    if kind == "add" or not t.dim():
        return t[None]
    if kind == "slice":
        return t.narrow(d, 0, r.randint(0, t.shape[d]))
    if kind == "drop" and t.shape[d]:
        return t.select(d, 0)
    if kind == "expand" and t.shape[d]:
        return t.narrow(d, 0, 1).expand_as(t)
    return t.transpose(d, -1)


# ---- the ops


@dataclass(frozen=True)
class Op:
    arguments: Callable[[Random], dict[str, Any]]
    reference: Callable[[dict[str, Any]], tuple[Tensor, ...] | None]


OPS = {
    "append_kv_": Op(_append, slow_ops.append),
    "compact_kv_": Op(_compact, slow_ops.compact),
    "gather_kv": Op(_gather, slow_ops.gather),
    "streaming_decode": Op(_decode, slow_ops.decode),
    "prefill_attn": Op(_prefill_masked, slow_ops.prefill),
    "prefill_attn_lazy": Op(_prefill_lazy, slow_ops.prefill),
    "retained_mass": Op(_mass, slow_ops.mass),
    "lazy_ratio": Op(_ratio, slow_ops.ratio),
    "merge_states": Op(_merge, slow_ops.merge),
}


# ---- the property


def _memory(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def _copy(value: Any) -> Any:
    """A tensor with the same strides over a copy of all its memory."""
    if not isinstance(value, Tensor):
        return value
    memory = _memory(value).clone().untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(memory, value.storage_offset(), value.shape, value.stride())


def _same_memory(a: dict[str, Any], b: dict[str, Any]) -> bool:
    tensors = [name for name, t in a.items() if isinstance(t, Tensor)]
    return all(torch.equal(_memory(a[name]), _memory(b[name])) for name in tensors)


def _comparable(arguments: dict[str, Any]) -> bool:
    """Is there one right result? Not where rows share pages, nor for values that overflow."""
    tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor)}
    table = arguments.get("block_table")
    if table is not None and table.unique().numel() != table.numel():
        return False
    scale = arguments.get("scale")
    if scale is not None and not 1e-3 <= scale <= 10:
        return False
    for name, lse in tensors.items():
        if name.startswith("lse") and lse.numel() and not lse.max() <= 100:  # NaN compares as False
            return False
        out = tensors.get(name.replace("lse", "out")) if name in ("lse_a", "lse_b") else None
        if out is not None and out.transpose(1, 2)[lse == -torch.inf].any():  # an empty state's out is 0
            return False
    floats = [t for name, t in tensors.items() if t.is_floating_point() and not name.startswith("lse")]
    return all(t.numel() == 0 or t.abs().max() <= 3 for t in floats)


def _assert_close(got: Any, want: tuple[Tensor, ...] | None) -> None:
    if want is None:
        assert got is None
        return
    got = got if isinstance(got, tuple) else (got,)
    for result, expected in zip(got, want, strict=True):
        assert result.shape == expected.shape
        assert result.is_contiguous()
        finite = expected.double().isfinite()
        assert torch.equal(result[~finite].double(), expected[~finite].double())
        tolerance = 1e-4 if not result.is_floating_point() else 8 * torch.finfo(result.dtype).eps + 1e-4
        torch.testing.assert_close(result[finite].double(), expected[finite].double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", OPS)
@settings(
    max_examples=120,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking nonsense takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(r=st.randoms(use_true_random=True), spoil=st.integers(0, 2))
def test_a_right_result_or_an_error(name, r, spoil):
    op = OPS[name]
    arguments = op.arguments(r)
    for _ in range(spoil):
        _spoil(r, arguments)
    expected = {key: _copy(value) for key, value in arguments.items()}
    try:
        result = getattr(ops, name)(**arguments)
    except (ValueError, TypeError, RuntimeError):
        assert spoil  # all of the others are in order
        assert _same_memory(arguments, expected)
        return
    if _comparable(arguments):
        want = op.reference(expected)
        assert _same_memory(arguments, expected)
        _assert_close(result, want)
