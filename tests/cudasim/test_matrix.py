"""mma.sync and ldmatrix against matrix products, with the fragment layouts as the PTX manual states them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import cudasim

_names = itertools.count()


def run_ptx(body: str, registers: str, *arrays: np.ndarray, shared: int = 0) -> cudasim.LaunchReport:
    """One warp; the body finds the arrays' addresses in %a0, %a1, ... and its lane in %lane."""
    name = f"matrix_{next(_names)}"
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    loads = "\n".join(f"ld.param.u64 %a{i}, [p{i}];" for i in range(len(arrays)))
    cudasim.load_ptx(f""".version 9.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry {name}({params})
{{
.reg .b64 %a<{len(arrays)}>; .reg .b64 %t<4>; .reg .b32 %lane; .reg .b32 %base;
{registers}
{loads}
mov.u32 %lane, %tid.x;
mov.u32 %base, smem;
{body}
ret;
}}
""")
    report = cudasim.kernel(name).launch(1, 32, *arrays, shared=shared)
    assert not report.findings, report.findings
    return report


def load_words(register: str, array: int, words: int) -> str:
    """register<words> = the lane's words of an array [32, words]."""
    lines = [f"mul.wide.u32 %t0, %lane, {4 * words};", f"add.u64 %t1, %a{array}, %t0;"]
    return "\n".join(lines + [f"ld.global.u32 {register}{i}, [%t1+{4 * i}];" for i in range(words)])


def store_words(register: str, array: int, words: int) -> str:
    lines = [f"mul.wide.u32 %t0, %lane, {4 * words};", f"add.u64 %t1, %a{array}, %t0;"]
    return "\n".join(lines + [f"st.global.u32 [%t1+{4 * i}], {register}{i};" for i in range(words)])


def run_mma(shape: str, types: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Fragments [32 lanes, words] of A, B and C to the words of D."""
    d = np.zeros_like(c)
    body = "\n".join(
        [load_words("%x", 0, a.shape[1]), load_words("%y", 1, b.shape[1]), load_words("%z", 2, c.shape[1])]
    )

    def group(register: str, n: int) -> str:
        return "{" + ", ".join(f"{register}{i}" for i in range(n)) + "}"

    fragments = ", ".join(group(r, x.shape[1]) for r, x in (("%w", d), ("%x", a), ("%y", b), ("%z", c)))
    body += f"\nmma.sync.aligned.{shape}.row.col.{types} {fragments};\n" + store_words("%w", 3, d.shape[1])
    run_ptx(body, ".reg .b32 %x<4>; .reg .b32 %y<2>; .reg .b32 %z<4>; .reg .b32 %w<4>;", a, b, c, d)
    return d


LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
ROWS = np.stack([G, G, G + 8, G + 8], 1)
COLUMNS = np.stack([2 * T, 2 * T + 1, 2 * T, 2 * T + 1], 1)


def pack16(x: torch.Tensor) -> np.ndarray:
    """Pairs of 16-bit elements to words, the first in the low half."""
    bits = x.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return bits[..., 0::2] | bits[..., 1::2] << 16


@pytest.mark.parametrize(
    ("k", "name", "dtype"), [(16, "bf16", torch.bfloat16), (16, "f16", torch.float16), (8, "bf16", torch.bfloat16)]
)
def test_mma_16_bit(k: int, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, k).to(dtype), torch.randn(k, 8).to(dtype)
    c = torch.randn(16, 8)
    quarters = [(G, 2 * T), (G + 8, 2 * T), (G, 2 * T + 8), (G + 8, 2 * T + 8)][: k // 4]
    fa = pack16(torch.stack([a[r][LANE, col + e] for r, col in quarters for e in (0, 1)], 1))
    fb = pack16(torch.stack([b[2 * T + e + 8 * i, G] for i in range(k // 8) for e in (0, 1)], 1))
    fc = c.numpy()[ROWS, COLUMNS].view(np.uint32)
    d = run_mma(f"m16n8k{k}", f"f32.{name}.{name}.f32", fa, fb, fc).view(np.float32)
    expected = a.double() @ b.double() + c
    np.testing.assert_allclose(d, expected.numpy()[ROWS, COLUMNS], rtol=1e-5, atol=1e-5)


def test_mma_f16_accumulator() -> None:
    torch.manual_seed(1)
    a, b, c = torch.randn(16, 16).half(), torch.randn(16, 8).half(), torch.randn(16, 8).half()
    quarters = [(G, 2 * T), (G + 8, 2 * T), (G, 2 * T + 8), (G + 8, 2 * T + 8)]
    fa = pack16(torch.stack([a[r][LANE, col + e] for r, col in quarters for e in (0, 1)], 1))
    fb = pack16(torch.stack([b[2 * T + e + 8 * i, G] for i in range(2) for e in (0, 1)], 1))
    fc = pack16(c[torch.from_numpy(ROWS), torch.from_numpy(COLUMNS)])
    d = run_mma("m16n8k16", "f16.f16.f16.f16", fa, fb, fc)
    got = np.stack([d & 0xFFFF, d >> 16], 2).reshape(32, 4).astype(np.uint16).view(np.float16)
    expected = (a.double() @ b.double() + c.double()).half().numpy()
    np.testing.assert_allclose(got, expected[ROWS, COLUMNS], rtol=1e-3)


@pytest.mark.parametrize("k", [4, 8])
def test_mma_tf32(k: int) -> None:
    rng = np.random.default_rng(2)
    truncated = np.uint32(0xFFFFE000)
    a = (rng.standard_normal((16, k)).astype(np.float32).view(np.uint32) & truncated).view(np.float32)
    b = (rng.standard_normal((k, 8)).astype(np.float32).view(np.uint32) & truncated).view(np.float32)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    blocks = [(G, T), (G + 8, T), (G, T + 4), (G + 8, T + 4)][: k // 2]
    fa = np.stack([a[r, col] for r, col in blocks], 1).view(np.uint32)
    fb = np.stack([b[T + 4 * i, G] for i in range(k // 4)], 1).view(np.uint32)
    d = run_mma(f"m16n8k{k}", "f32.tf32.tf32.f32", fa, fb, c[ROWS, COLUMNS].view(np.uint32)).view(np.float32)
    np.testing.assert_allclose(d, (a.astype(np.float64) @ b + c)[ROWS, COLUMNS], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize("signs", ["s8.s8", "u8.s8"])
def test_mma_int8(k: int, signs: str) -> None:
    rng = np.random.default_rng(3)
    left, right = signs.split(".")
    a = rng.integers(0, 256, (16, k)).astype(np.uint8)
    b = rng.integers(0, 256, (k, 8)).astype(np.uint8)
    c = rng.integers(-1000, 1000, (16, 8)).astype(np.int32)
    blocks = [(G, 4 * T), (G + 8, 4 * T), (G, 4 * T + 16), (G + 8, 4 * T + 16)][: k // 8]
    fa = np.stack([a[r, col + e] for r, col in blocks for e in range(4)], 1).copy().view(np.uint32)
    fb = np.stack([b[4 * T + 16 * i + e, G] for i in range(k // 16) for e in range(4)], 1).copy().view(np.uint32)
    d = run_mma(f"m16n8k{k}", f"s32.{signs}.s32", fa, fb, c[ROWS, COLUMNS].view(np.uint32)).view(np.int32)
    x = a.astype(np.int64) if left == "u8" else a.view(np.int8).astype(np.int64)
    y = b.astype(np.int64) if right == "u8" else b.view(np.int8).astype(np.int64)
    np.testing.assert_array_equal(d, (x @ y + c)[ROWS, COLUMNS])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count: int, transposed: bool) -> None:
    rows = np.random.default_rng(4).integers(0, 1 << 16, (32, 8)).astype(np.uint16)  # row r of matrix r // 8
    out = np.zeros((32, 4), np.uint32)
    registers = "{" + ", ".join(f"%w{i}" for i in range(count)) + "}"
    trans = ".trans" if transposed else ""
    body = f"""
    {load_words("%x", 0, 4)}
    mad.lo.u32 %r0, %lane, 16, %base;
    st.shared.v4.u32 [%r0], {{%x0, %x1, %x2, %x3}};
    bar.warp.sync -1;
    // lanes whose address does not count hold nonsense
    setp.lt.u32 %p, %lane, {8 * count};
    selp.b32 %r0, %r0, -5, %p;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [%r0];
    {store_words("%w", 1, count).replace(f"{4 * count};", "16;", 1)}
    """
    run_ptx(
        body, ".reg .b32 %x<4>; .reg .b32 %w<4>; .reg .b32 %r<2>; .reg .pred %p;", rows.view(np.uint32), out, shared=512
    )
    for j in range(count):
        matrix = rows[8 * j : 8 * j + 8]
        matrix = matrix.T if transposed else matrix
        expected = matrix[G, 2 * T].astype(np.uint32) | matrix[G, 2 * T + 1].astype(np.uint32) << 16
        np.testing.assert_array_equal(out[:, j], expected)


def test_movmatrix_transposes() -> None:
    matrix = np.random.default_rng(5).integers(0, 1 << 16, (8, 8)).astype(np.uint16)
    out = np.zeros((32, 1), np.uint32)
    body = f"{load_words('%x', 0, 1)}\nmovmatrix.sync.aligned.m8n8.trans.b16 %w0, %x0;\n{store_words('%w', 1, 1)}"
    run_ptx(body, ".reg .b32 %x<1>; .reg .b32 %w<1>;", matrix.view(np.uint32).reshape(32, 1).copy(), out)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(8, 8), matrix.T)
