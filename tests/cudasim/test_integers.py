"""Integer, bit field, shift and logic instructions against Python's integers, over random and extreme values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cudasim import ptx_builder
from cudasim.ptx_builder import Spec, dtype
from cudasim.ptx_values import N, values, wide, wrap


def div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero; by zero all ones, as the hardware does."""
    quotient = [
        -1 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a, b, strict=True)
    ]
    return np.array(quotient, dtype=object)


def rem(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    remainder = [x if y == 0 else abs(x) % abs(y) * (-1 if x < 0 else 1) for x, y in zip(a, b, strict=True)]
    return np.array(remainder, dtype=object)


TWO: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "div": div,
    "rem": rem,
    "min": np.minimum,
    "max": np.maximum,
}


@pytest.mark.parametrize("ptx_type", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("op", TWO)
def test_integer_pairs(op: str, ptx_type: str) -> None:
    a, b = values(ptx_type, 1), values(ptx_type, 2)
    (got,) = ptx_builder.run(Spec(f"{op}.{ptx_type} %d0, %s0, %s1;", [ptx_type], [ptx_type] * 2), a, b)
    np.testing.assert_array_equal(got, wrap(TWO[op](wide(a), wide(b)), ptx_type))


@pytest.mark.parametrize("ptx_type", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_products(ptx_type: str) -> None:
    a, b, c = (values(ptx_type, s) for s in range(3))
    bits = 8 * np.dtype(dtype(ptx_type)).itemsize
    product = wide(a) * wide(b)
    (hi,) = ptx_builder.run(Spec(f"mul.hi.{ptx_type} %d0, %s0, %s1;", [ptx_type], [ptx_type] * 2), a, b)
    np.testing.assert_array_equal(hi, wrap(product >> bits, ptx_type))
    (mad,) = ptx_builder.run(Spec(f"mad.lo.{ptx_type} %d0, %s0, %s1, %s2;", [ptx_type], [ptx_type] * 3), a, b, c)
    np.testing.assert_array_equal(mad, wrap(product + wide(c), ptx_type))
    if bits < 64:
        double = f"{ptx_type[0]}{2 * bits}"
        d = values(double, 3)
        (mul,) = ptx_builder.run(Spec(f"mul.wide.{ptx_type} %d0, %s0, %s1;", [double], [ptx_type] * 2), a, b)
        np.testing.assert_array_equal(mul, wrap(product, double))
        spec = Spec(f"mad.wide.{ptx_type} %d0, %s0, %s1, %s2;", [double], [ptx_type, ptx_type, double])
        (mad,) = ptx_builder.run(spec, a, b, d)
        np.testing.assert_array_equal(mad, wrap(product + wide(d), double))


def test_carries_make_a_128_bit_sum_and_product() -> None:
    a, b, c, d = (values("u64", s) for s in range(4))
    body = "add.cc.u64 %d0, %s0, %s2; addc.u64 %d1, %s1, %s3;"
    lo, hi = ptx_builder.run(Spec(body, ["u64"] * 2, ["u64"] * 4), a, b, c, d)
    total = (wide(a) + (wide(b) << 64)) + (wide(c) + (wide(d) << 64))
    np.testing.assert_array_equal(lo, wrap(total, "u64"))
    np.testing.assert_array_equal(hi, wrap(total >> 64, "u64"))
    body = "sub.cc.u64 %d0, %s0, %s2; subc.u64 %d1, %s1, %s3;"
    lo, hi = ptx_builder.run(Spec(body, ["u64"] * 2, ["u64"] * 4), a, b, c, d)
    total = (wide(a) + (wide(b) << 64)) - (wide(c) + (wide(d) << 64))
    np.testing.assert_array_equal(lo, wrap(total, "u64"))
    np.testing.assert_array_equal(hi, wrap(total >> 64, "u64"))
    x, y = values("u32", 5), values("u32", 6)
    body = "mad.lo.cc.u32 %d0, %s0, %s1, %s0; madc.hi.u32 %d1, %s0, %s1, %s1;"
    lo, hi = ptx_builder.run(Spec(body, ["u32"] * 2, ["u32"] * 2), x, y)
    total = wide(x) * wide(y) + wide(x) + (wide(y) << 32)
    np.testing.assert_array_equal(lo, wrap(total, "u32"))
    np.testing.assert_array_equal(hi, wrap(total >> 32, "u32"))


def test_bit_counts_and_fields() -> None:
    a, b = values("u32", 1), values("u32", 2)
    position, length = b & 63, (b >> 8) & 63
    places = [(int(p), int(n)) for p, n in zip(position, length, strict=True)]

    def run(body: str, *sources: np.ndarray) -> np.ndarray:
        return ptx_builder.run(Spec(body, ["u32"], ["u32"] * len(sources)), *sources)[0]

    np.testing.assert_array_equal(run("popc.b32 %d0, %s0;", a), [int(x).bit_count() for x in a])
    np.testing.assert_array_equal(run("clz.b32 %d0, %s0;", a), [32 - int(x).bit_length() for x in a])
    find = [int(x).bit_length() - 1 if x else 0xFFFFFFFF for x in a]
    np.testing.assert_array_equal(run("bfind.u32 %d0, %s0;", a), find)
    np.testing.assert_array_equal(run("brev.b32 %d0, %s0;", a), [int(f"{x:032b}"[::-1], 2) for x in a])
    fields = [(int(x) >> p) & ((1 << n) - 1) for x, (p, n) in zip(a, places, strict=True)]
    np.testing.assert_array_equal(run("bfe.u32 %d0, %s0, %s1, %s2;", a, position, length), fields)
    insert = [
        (int(y) & ~(((1 << n) - 1) << p) | ((int(x) & ((1 << n) - 1)) << p)) & 0xFFFFFFFF
        for x, y, (p, n) in zip(a, b, places, strict=True)
    ]
    np.testing.assert_array_equal(run("bfi.b32 %d0, %s0, %s1, %s2, %s3;", a, b, position, length), insert)

    def signed_field(x: int, p: int, n: int) -> int:  # past the top, bits repeat the sign
        signed = x - (1 << 32) if x >> 31 else x
        return 0 if n == 0 else ((signed >> p) & ((1 << n) - 1)) - ((signed >> min(p + n - 1, 31) & 1) << n)

    signed = [signed_field(int(x), p, n) & 0xFFFFFFFF for x, (p, n) in zip(a, places, strict=True)]
    np.testing.assert_array_equal(run("bfe.s32 %d0, %s0, %s1, %s2;", a, position, length), signed)


@pytest.mark.parametrize("ptx_type", ["b16", "b32", "b64", "s32", "u64", "s64"])
def test_shift_counts_clamp(ptx_type: str) -> None:
    a, n = values(ptx_type, 1), values("u32", 2) % 80
    bits = 8 * np.dtype(dtype(ptx_type)).itemsize
    (got,) = ptx_builder.run(Spec(f"shr.{ptx_type} %d0, %s0, %s1;", [ptx_type], [ptx_type, "u32"]), a, n)
    expected = [int(x) >> min(int(k), bits) for x, k in zip(a, n, strict=True)]
    np.testing.assert_array_equal(got, wrap(expected, ptx_type))
    (got,) = ptx_builder.run(Spec(f"shl.b{bits} %d0, %s0, %s1;", [ptx_type], [ptx_type, "u32"]), a, n)
    np.testing.assert_array_equal(got, wrap([int(x) << int(k) for x, k in zip(a, n, strict=True)], ptx_type))


def test_funnel_shift_and_permute() -> None:
    a, b, c = (values("u32", s) for s in range(3))
    both = wide(a) + (wide(b) << 32)
    for mode, count in (("clamp", np.minimum(c, 32)), ("wrap", c & 31)):
        (left,) = ptx_builder.run(Spec(f"shf.l.{mode}.b32 %d0, %s0, %s1, %s2;", ["u32"], ["u32"] * 3), a, b, c)
        np.testing.assert_array_equal(
            left, wrap([(x << int(k)) >> 32 for x, k in zip(both, count, strict=True)], "u32")
        )
        (right,) = ptx_builder.run(Spec(f"shf.r.{mode}.b32 %d0, %s0, %s1, %s2;", ["u32"], ["u32"] * 3), a, b, c)
        np.testing.assert_array_equal(right, wrap([x >> int(k) for x, k in zip(both, count, strict=True)], "u32"))
    (got,) = ptx_builder.run(Spec("prmt.b32 %d0, %s0, %s1, %s2;", ["u32"], ["u32"] * 3), a, b, c)

    def permute(pair: int, selector: int) -> int:
        r = 0
        for k in range(4):
            s = selector >> (4 * k) & 15
            byte = pair >> (8 * (s & 7)) & 0xFF
            r |= ((0xFF if byte & 0x80 else 0) if s & 8 else byte) << (8 * k)
        return r

    np.testing.assert_array_equal(got, [permute(int(x), int(s)) for x, s in zip(both, c, strict=True)])


@pytest.mark.parametrize("lut", [0x00, 0x96, 0xE8, 0xCA, 0x3C, 0xFF, 0x01, 0x80, 0x6A])
def test_lop3(lut: int) -> None:
    a, b, c = (values("b32", s) for s in range(3))
    (got,) = ptx_builder.run(Spec(f"lop3.b32 %d0, %s0, %s1, %s2, {lut};", ["b32"], ["b32"] * 3), a, b, c)
    expected = np.zeros(N, np.uint32)
    for bit in range(32):
        index = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
        expected |= (np.uint32(lut) >> index & np.uint32(1)) << np.uint32(bit)
    np.testing.assert_array_equal(got, expected)
