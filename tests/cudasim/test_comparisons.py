"""Comparisons, and predicates as they combine and guard, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cudasim import ptx_builder
from cudasim.ptx_builder import Spec
from cudasim.ptx_values import N, values

_ORDERED = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}


@pytest.mark.parametrize("ptx_type", ["u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64"])
@pytest.mark.parametrize("op", _ORDERED)
def test_comparisons(op: str, ptx_type: str) -> None:
    a = values(ptx_type, 1)
    b = np.where(np.arange(N) % 3 == 0, a, values(ptx_type, 2))
    body = f".reg .pred p, q; setp.{op}.{ptx_type} p|q, %s0, %s1; selp.u32 %d0, 1, 0, p; selp.u32 %d1, 1, 0, q;"
    p, q = ptx_builder.run(Spec(body, ["u32"] * 2, [ptx_type] * 2), a, b)
    ordered = ~(np.isnan(a) | np.isnan(b)) if ptx_type[0] == "f" else np.ones(N, bool)
    expected = getattr(a, _ORDERED[op])(b) & ordered
    np.testing.assert_array_equal(p, expected)
    np.testing.assert_array_equal(q, ~expected)
    if ptx_type[0] == "f":
        body = f".reg .pred p; setp.{op}u.{ptx_type} p, %s0, %s1; selp.u32 %d0, 1, 0, p;"
        (p,) = ptx_builder.run(Spec(body, ["u32"], [ptx_type] * 2), a, b)
        np.testing.assert_array_equal(p, expected | ~ordered)


def test_predicates_combine_and_guards_keep_old_values() -> None:
    a, b = values("s32", 1), values("s32", 2)
    body = """.reg .pred p, q, r;
      setp.lt.s32 p, %s0, 0;
      setp.lt.and.s32 q, %s1, 0, !p;
      or.pred r, p, q;
      not.pred r, r;
      mov.u32 %d0, 7;
      @p mov.u32 %d0, 1;
      @q mov.u32 %d0, 2;
      @!r add.u32 %d0, %d0, 10;"""
    (got,) = ptx_builder.run(Spec(body, ["u32"], ["s32"] * 2), a, b)
    np.testing.assert_array_equal(got, np.where(a < 0, 11, np.where(b < 0, 12, 7)))
