"""Float instructions against numpy's and exact fractions: rounding, NaN, denormals, approximations."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from cudasim import ptx_builder
from cudasim.ptx_builder import Spec
from cudasim.ptx_values import N, values


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
