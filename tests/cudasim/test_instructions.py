"""Integer, logic, comparison and float instructions against host arithmetic, over random and extreme values."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

import cudasim
from cudasim import ptx_builder
from cudasim.ptx_builder import Spec, dtype

N = 1024


def values(ptx_type: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    t = np.dtype(dtype(ptx_type))
    if t.kind == "f":
        x = (rng.standard_normal(N) * 10.0 ** rng.integers(-12, 12, N)).astype(t)
        tiny = np.finfo(t).tiny
        special = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1.5,
            2.5,
            -2.5,
            np.inf,
            -np.inf,
            np.nan,
            tiny,
            tiny / 4,
            -tiny / 8,
            np.finfo(t).max,
        ]
    else:
        x = rng.integers(0, 2 ** (8 * t.itemsize), N, dtype=np.uint64).astype(t)
        info = np.iinfo(t)
        special = [0, 1, 2, 3, 31, 32, 33, 63, info.max, info.min, info.max - 1, info.min + 1]
    special = np.array(special, dtype=t)
    x[: 4 * len(special)] = np.tile(special, 4)
    return rng.permutation(x)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(object)


def wrap(x: np.ndarray, ptx_type: str) -> np.ndarray:
    t = np.dtype(dtype(ptx_type))
    bits = 8 * t.itemsize
    mask = (1 << bits) - 1
    unsigned = np.array([int(v) & mask for v in x], dtype=f"u{t.itemsize}")
    return unsigned.view(t)


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


@pytest.mark.parametrize("ptx_type", ["f32", "f64"])
def test_float_arithmetic_is_ieee(ptx_type: str) -> None:
    a, b = values(ptx_type, 1), values(ptx_type, 2)
    with np.errstate(all="ignore"):
        expected = {"add.rn": a + b, "sub.rn": a - b, "mul.rn": a * b, "div.rn": a / b}
        for op, e in expected.items():
            (got,) = ptx_builder.run(Spec(f"{op}.{ptx_type} %d0, %s0, %s1;", [ptx_type], [ptx_type] * 2), a, b)
            np.testing.assert_array_equal(got, e)
        (root,) = ptx_builder.run(Spec(f"sqrt.rn.{ptx_type} %d0, %s0;", [ptx_type], [ptx_type]), np.abs(a))
        np.testing.assert_array_equal(root, np.sqrt(np.abs(a)))


def test_fma_rounds_once_and_ftz_flushes() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, N)).astype(np.float32)
    c = (-a.astype(np.float64) * b).astype(np.float32)  # the product's rounding error is what remains
    (got,) = ptx_builder.run(Spec("fma.rn.f32 %d0, %s0, %s1, %s2;", ["f32"], ["f32"] * 3), a, b, c)
    exact = [
        float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(got, np.array(exact).astype(np.float32))
    assert np.abs(got).max() > 0
    tiny = np.full(N, np.float32(1e-39))
    (kept,) = ptx_builder.run(Spec("add.f32 %d0, %s0, %s0;", ["f32"], ["f32"]), tiny)
    (flushed,) = ptx_builder.run(Spec("add.ftz.f32 %d0, %s0, %s0;", ["f32"], ["f32"]), tiny)
    assert (kept > 0).all()
    assert (flushed == 0).all()


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "mul", "fma"])
def test_directed_rounding(op: str, mode: str) -> None:
    rng = np.random.default_rng(1)
    a, b, c = rng.standard_normal((3, N)).astype(np.float32)
    sources, args = ((a, b, c), "%s0, %s1, %s2") if op == "fma" else ((a, b), "%s0, %s1")
    (got,) = ptx_builder.run(Spec(f"{op}.{mode}.f32 %d0, {args};", ["f32"], ["f32"] * len(sources)), *sources)
    for i in range(N):
        x, y, z = (Fraction(float(v[i])) for v in (a, b, c))
        exact = x + y if op == "add" else x * y if op == "mul" else x * y + z
        g = Fraction(float(got[i]))
        toward_zero = abs(g) <= abs(exact)
        assert {"rz": toward_zero, "rm": g <= exact, "rp": g >= exact}[mode]
        outward = np.nextafter(
            got[i], np.float32(-np.inf if (mode == "rp" or (mode == "rz" and exact < 0)) else np.inf)
        )
        assert abs(Fraction(float(outward)) - g) > abs(exact - g)  # no closer value on the allowed side


def test_min_and_max_drop_nan() -> None:
    a, b = values("f32", 1), values("f32", 2)
    for op, f, nan in (("min", np.fmin, np.minimum), ("max", np.fmax, np.maximum)):
        (got,) = ptx_builder.run(Spec(f"{op}.f32 %d0, %s0, %s1;", ["f32"], ["f32"] * 2), a, b)
        np.testing.assert_array_equal(got, f(a, b))
        (got,) = ptx_builder.run(Spec(f"{op}.NaN.f32 %d0, %s0, %s1;", ["f32"], ["f32"] * 2), a, b)
        np.testing.assert_array_equal(got, nan(a, b))
    zeros = np.tile(np.array([0.0, -0.0], np.float32), N // 2)
    (low,) = ptx_builder.run(Spec("min.f32 %d0, %s0, %s1;", ["f32"], ["f32"] * 2), zeros, -zeros)
    (high,) = ptx_builder.run(Spec("max.f32 %d0, %s0, %s1;", ["f32"], ["f32"] * 2), zeros, -zeros)
    assert np.signbit(low).all()
    assert not np.signbit(high).any()


@pytest.mark.parametrize(
    ("op", "f", "low", "high"),
    [
        ("ex2.approx", np.exp2, -140.0, 127.0),
        ("ex2.approx.ftz", np.exp2, -120.0, 127.0),
        ("lg2.approx", np.log2, 1e-30, 1e30),
        ("rcp.approx", lambda x: 1 / x, 1e-30, 1e30),
        ("rsqrt.approx", lambda x: 1 / np.sqrt(x), 1e-30, 1e30),
        ("sin.approx", np.sin, -3.0, 3.0),
        ("tanh.approx", np.tanh, -5.0, 5.0),
    ],
)
def test_special_functions(op: str, f: Callable, low: float, high: float) -> None:
    x = np.random.default_rng(2).uniform(low, high, N).astype(np.float32)
    (got,) = ptx_builder.run(Spec(f"{op}.f32 %d0, %s0;", ["f32"], ["f32"]), x)
    exact = f(x.astype(np.float64))
    denormal_step = 2.0**-149
    assert (np.abs(got - exact) <= 3e-7 * np.abs(exact) + (0 if "ftz" in op else denormal_step)).all()


def test_ex2_of_the_extremes() -> None:
    x = np.resize(np.array([-np.inf, np.inf, np.nan, 0, -149, -150, -200, 128, 127.999], np.float32), N)
    (got,) = ptx_builder.run(Spec("ex2.approx.f32 %d0, %s0;", ["f32"], ["f32"]), x)
    assert got[0] == 0
    assert got[1] == np.inf
    assert np.isnan(got[2])
    assert got[3] == 1
    assert got[4] == np.float32(2.0**-149)
    assert (got[5:7] == 0).all()
    assert got[7] == np.inf
    assert np.isfinite(got[8])
    (flushed,) = ptx_builder.run(Spec("ex2.approx.ftz.f32 %d0, %s0;", ["f32"], ["f32"]), x)
    assert flushed[0] == 0
    assert flushed[4] == 0


def test_cache_hints_change_nothing() -> None:
    cudasim.load_ptx("""
.version 9.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry cache_hints(.param .u64 x, .param .u64 y) {
.reg .b64 %a<4>; .reg .b32 %r<8>; .reg .b64 %policy;
ld.param.u64 %a0, [x];
ld.param.u64 %a1, [y];
mov.u32 %r0, %tid.x;
mul.wide.u32 %a2, %r0, 16;
add.u64 %a0, %a0, %a2;
add.u64 %a1, %a1, %a2;
mov.u32 %r1, smem;
mad.lo.u32 %r1, %r0, 16, %r1;
createpolicy.fractional.L2::evict_first.b64 %policy, 1.0;
cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r1], [%a0], 16, %policy;
cp.async.wait_all;
ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1];
ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %r6, [%a0], %policy;
add.u32 %r2, %r2, %r6;
prefetch.global.L2 [%a0];
st.global.L2::cache_hint.v4.u32 [%a1], {%r2, %r3, %r4, %r5}, %policy;
ret;
}""")
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    report = cudasim.kernel("cache_hints").launch(1, 32, x, y, shared=512)
    assert not report.findings, report.findings
    expected = x.copy()
    expected[::4] *= 2
    np.testing.assert_array_equal(y, expected)
