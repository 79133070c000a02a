"""cvt between all formats, and arithmetic of 16-bit floats, against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from cudasim import ptx_builder
from cudasim.ptx_builder import Spec, dtype

N = 512
_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16}
_MANTISSA = {"f16": (10, -14, 15), "bf16": (7, -126, 127)}


def to_float(bits: np.ndarray, half: str) -> np.ndarray:
    return torch.from_numpy(bits.view(np.int16).copy()).view(_TORCH[half]).double().numpy()


def round_half(x: Fraction, half: str, toward_zero: bool = False) -> float:
    """The nearest value of the format, ties to even."""
    mantissa, low, high = _MANTISSA[half]
    if x == 0:
        return 0.0
    magnitude, exponent = abs(x), low
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - mantissa)
    units = magnitude // step
    rest = magnitude / step - units
    if not toward_zero and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and units % 2)):
        units += 1
    value = units * step
    if value >= Fraction(2) ** (high + 1):
        value = Fraction(2) ** (high + 1) if not toward_zero else value
        return float("inf") * (1 if x > 0 else -1)
    return float(value) * (1 if x > 0 else -1)


def half_bits(half: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 16, N).astype(np.uint16)
    exponent_mask = 0x7C00 if half == "f16" else 0x7F80
    return np.where((x & exponent_mask) == exponent_mask, x & 0x83FF, x)  # finite


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_all_16_bit_values_widen(half: str) -> None:
    x = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    (got,) = ptx_builder.run(Spec(f"cvt.f32.{half} %d0, %s0;", ["f32"], [half]), x)
    np.testing.assert_array_equal(got, to_float(x, half).astype(np.float32))


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_narrowing_rounds_to_nearest_even(half: str) -> None:
    rng = np.random.default_rng(0)
    scale = 2.0 ** rng.integers(-30, 20, N)
    x = (rng.standard_normal(N) * scale).astype(np.float32)
    ties = to_float(half_bits(half, 1), half)  # values, and points half way between neighbours
    neighbours = to_float(np.minimum(half_bits(half, 1) + 1, 0xFFFF).astype(np.uint16), half)
    with np.errstate(invalid="ignore", over="ignore"):
        x[: N // 2] = ((ties + neighbours) / 2)[: N // 2].astype(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1))
    (got,) = ptx_builder.run(Spec(f"cvt.rn.{half}.f32 %d0, %s0;", [half], ["f32"]), x)
    expected = [round_half(Fraction(float(v)), half) for v in x]
    np.testing.assert_array_equal(to_float(got, half), expected)
    (pair,) = ptx_builder.run(Spec(f"cvt.rn.{half}x2.f32 %d0, %s0, %s1;", ["b32"], ["f32"] * 2), x, x[::-1].copy())
    np.testing.assert_array_equal(to_float((pair >> 16).astype(np.uint16), half), expected)  # the first source on top
    np.testing.assert_array_equal(to_float((pair & 0xFFFF).astype(np.uint16), half), expected[::-1])
    (cut,) = ptx_builder.run(Spec(f"cvt.rz.{half}.f32 %d0, %s0;", [half], ["f32"]), x)
    inside = np.abs(x) < (60000 if half == "f16" else 1e38)
    towards = np.array([round_half(Fraction(float(v)), half, toward_zero=True) for v in x])
    np.testing.assert_array_equal(to_float(cut, half)[inside], towards[inside])


def test_infinities_and_nan_narrow() -> None:
    x = np.resize(np.array([np.inf, -np.inf, np.nan, 1e30, 65519.0, 65520.0], np.float32), N // 16 * 12)
    x = np.resize(x, 96)
    (f16,) = ptx_builder.run(Spec("cvt.rn.f16.f32 %d0, %s0;", ["f16"], ["f32"]), x)
    np.testing.assert_array_equal(f16[:6], [0x7C00, 0xFC00, 0x7FFF, 0x7C00, 0x7BFF, 0x7C00])
    (bf16,) = ptx_builder.run(Spec("cvt.rn.bf16.f32 %d0, %s0;", ["bf16"], ["f32"]), x)
    np.testing.assert_array_equal(bf16[:3], [0x7F80, 0xFF80, 0x7FFF])


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_half_arithmetic_rounds_once(half: str) -> None:
    a, b, c = (half_bits(half, s) for s in range(3))
    x, y, z = ([Fraction(v) for v in to_float(bits, half)] for bits in (a, b, c))
    cases = {
        f"fma.rn.{half} %d0, %s0, %s1, %s2;": [p * q + r for p, q, r in zip(x, y, z, strict=True)],
    }
    if half == "f16":
        cases["add.f16 %d0, %s0, %s1;"] = [p + q for p, q in zip(x, y, strict=True)]
        cases["mul.f16 %d0, %s0, %s1;"] = [p * q for p, q in zip(x, y, strict=True)]
    for body, exact in cases.items():
        (got,) = ptx_builder.run(Spec(body, [half], [half] * 3), a, b, c)
        np.testing.assert_array_equal(to_float(got, half), [round_half(e, half) for e in exact])
    pair = a.astype(np.uint32) | b.astype(np.uint32) << 16
    other = c.astype(np.uint32) | a.astype(np.uint32) << 16
    (got,) = ptx_builder.run(Spec(f"max.{half}x2 %d0, %s0, %s1;", ["b32"], ["b32"] * 2), pair, other)
    np.testing.assert_array_equal(
        to_float((got & 0xFFFF).astype(np.uint16), half), np.maximum(to_float(a, half), to_float(c, half))
    )
    np.testing.assert_array_equal(
        to_float((got >> 16).astype(np.uint16), half), np.maximum(to_float(b, half), to_float(a, half))
    )


_INTEGERS = ["u16", "s16", "u32", "s32", "u64", "s64"]


@pytest.mark.parametrize("to", _INTEGERS)
@pytest.mark.parametrize("source", _INTEGERS)
def test_integer_to_integer(source: str, to: str) -> None:
    t = np.dtype(dtype(source))
    x = np.random.default_rng(3).integers(0, 2 ** (8 * t.itemsize), N, dtype=np.uint64).astype(t)
    (got,) = ptx_builder.run(Spec(f"cvt.{to}.{source} %d0, %s0;", [to], [source]), x)
    np.testing.assert_array_equal(got, x.astype(dtype(to)))
    (got,) = ptx_builder.run(Spec(f"cvt.sat.{to}.{source} %d0, %s0;", [to], [source]), x)
    info = np.iinfo(dtype(to))
    np.testing.assert_array_equal(got, np.clip(x.astype(object), info.min, info.max).astype(dtype(to)))


@pytest.mark.parametrize("source", ["s8", "u8"])
def test_bytes_extend_from_a_wider_register(source: str) -> None:
    x = np.arange(N, dtype=np.uint32) * 0x01010103
    (got,) = ptx_builder.run(Spec(f"cvt.s32.{source} %d0, %s0;", ["s32"], ["u32"]), x)
    np.testing.assert_array_equal(got, x.astype(np.int8 if source == "s8" else np.uint8))


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_float_to_integer_saturates(source: str, to: str, mode: str) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal(N) * 2.0 ** rng.integers(-3, 70, N)).astype(dtype(source))
    x[:16] = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        1e300 if source == "f64" else 1e38,
        3.99,
        -3.99,
        7,
        8,
        9,
        10,
    ]
    f = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    info = np.iinfo(dtype(to))
    expected = [
        info.max if v == np.inf else info.min if v == -np.inf else min(max(int(v), info.min), info.max) for v in f(x)
    ]
    (got,) = ptx_builder.run(Spec(f"cvt.{mode}.{to}.{source} %d0, %s0;", [to], [source]), x)
    np.testing.assert_array_equal(got, np.array(expected, dtype=object).astype(dtype(to)))


def test_nan_to_integer_is_zero() -> None:
    x = np.full(32, np.nan, np.float32)
    (got,) = ptx_builder.run(Spec("cvt.rzi.s32.f32 %d0, %s0;", ["s32"], ["f32"]), x)
    np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize("source", _INTEGERS)
@pytest.mark.parametrize("to", ["f32", "f64"])
def test_integer_to_float(source: str, to: str) -> None:
    t = np.dtype(dtype(source))
    x = np.random.default_rng(5).integers(0, 2 ** (8 * t.itemsize), N, dtype=np.uint64).astype(t)
    (got,) = ptx_builder.run(Spec(f"cvt.rn.{to}.{source} %d0, %s0;", [to], [source]), x)
    np.testing.assert_array_equal(got, x.astype(dtype(to)))


def test_float_to_float() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal(N) * 10.0 ** rng.integers(-40, 36, N)
    (narrow,) = ptx_builder.run(Spec("cvt.rn.f32.f64 %d0, %s0;", ["f32"], ["f64"]), x)
    np.testing.assert_array_equal(narrow, x.astype(np.float32))
    (down,) = ptx_builder.run(Spec("cvt.rm.f32.f64 %d0, %s0;", ["f32"], ["f64"]), x)
    assert (down.astype(np.float64) <= x).all()
    assert (np.nextafter(down, np.float32(np.inf)).astype(np.float64) > x).all()
    y = (rng.standard_normal(N) * 100).astype(np.float32)
    (integral,) = ptx_builder.run(Spec("cvt.rni.f32.f32 %d0, %s0;", ["f32"], ["f32"]), y)
    np.testing.assert_array_equal(integral, np.rint(y))
    (saturated,) = ptx_builder.run(Spec("cvt.sat.f32.f32 %d0, %s0;", ["f32"], ["f32"]), y)
    np.testing.assert_array_equal(saturated, np.clip(y, 0, 1))
    (tf32,) = ptx_builder.run(Spec("cvt.rna.tf32.f32 %d0, %s0;", ["b32"], ["f32"]), y)
    assert (tf32 & 0x1FFF == 0).all()
    np.testing.assert_allclose(tf32.view(np.float32), y, rtol=2.0**-11)
