"""Bank conflicts, coalescing and instruction counts of patterns whose answers are known by arithmetic."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import cudasim

SOURCE = Path(__file__).parent / "kernels" / "patterns.cu"
pytestmark = pytest.mark.skipif(cudasim.nvcc() is None, reason="needs nvcc to compile kernels/patterns.cu")


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    cudasim.load_library(cudasim.compile_library(SOURCE))


def launch(name: str, grid: int, block: int, *args: object, shared: int = 0) -> cudasim.LaunchReport:
    report = cudasim.kernel(name).launch(grid, block, *args, shared=shared)
    assert not report.findings, report.findings
    return report


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 16, 17, 32, 33])
def test_word_strides_conflict_gcd_ways(stride: int) -> None:
    out = np.zeros(32, np.float32)
    report = launch("shared_stride", 1, 32, out, stride, shared=32 * 33 * 4)
    ways = math.gcd(stride, 32)
    assert report.shared_load["wavefronts"] == ways
    assert report.shared_store["wavefronts"] == ways
    assert report.bank_conflicts == 2 * (ways - 1)
    np.testing.assert_array_equal(out, np.arange(32))


def test_a_broadcast_is_no_conflict() -> None:
    report = launch("shared_broadcast", 1, 32, np.zeros(32, np.float32))
    assert report.bank_conflicts == 0


@pytest.mark.parametrize(("stride", "ways"), [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8)])
def test_wide_accesses_go_in_quarter_warps(stride: int, ways: int) -> None:
    report = launch("shared_wide", 1, 32, np.zeros((32, 4), np.float32), stride, shared=32 * 8 * 16)
    assert report.shared_load["ideal_wavefronts"] == 4
    assert report.shared_load["wavefronts"] == 4 * ways


@pytest.mark.parametrize(
    ("row_bytes", "swizzle", "ways"), [(16, 0, 1), (128, 0, 8), (128, 1, 1), (64, 0, 4), (144, 0, 1)]
)
def test_ldmatrix(row_bytes: int, swizzle: int, ways: int) -> None:
    report = launch("ldmatrix_rows", 1, 32, np.zeros(32, np.uint32), row_bytes, swizzle, shared=32 * 144 + 128)
    assert report.instructions["ldmatrix"] == 1
    assert report.shared_load["wavefronts"] == 4 * ways
    assert report.bank_conflicts == 4 * (ways - 1)
    (line,) = [line for line in report.lines() if line["class"] == "ldmatrix"]
    assert line["wavefronts"] == 4 * ways
    assert SOURCE.name in line["source"]


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (16, 32)])
def test_sectors_of_strided_loads(stride: int, sectors: int) -> None:
    storage = np.zeros(2048 * 16 + 32, np.float32)
    offset = -storage.ctypes.data // 4 % 32  # to a multiple of 128 bytes
    x, y = storage[offset:][: 64 * 16], storage[offset:][2048 * 8 :][:64]
    report = launch("global_stride", 2, 32, x, y, stride)
    assert report.global_load["sectors"] == 2 * sectors
    assert report.global_load["ideal_sectors"] == 2 * 4
    assert report.global_store["sectors"] == 2 * 4
    assert report.global_efficiency == pytest.approx(16 / (2 * sectors + 8))


def test_wide_and_uniform_loads_are_ideal() -> None:
    storage = np.zeros(1024, np.float32)
    offset = -storage.ctypes.data // 4 % 32
    x, y = storage[offset:][:256], storage[offset:][512:768]
    report = launch("global_wide", 2, 32, x, y)
    assert report.global_load["sectors"] == report.global_store["sectors"] == 32
    assert report.global_efficiency == 1
    report = launch("global_same", 1, 32, x, y)
    assert report.global_load["sectors"] == 1
    assert report.global_efficiency == 1


def test_instructions_are_counted_for_each_warp() -> None:
    one = launch("global_same", 1, 32, np.zeros(32, np.float32), np.zeros(32, np.float32))
    three = launch("global_same", 1, 96, np.zeros(32, np.float32), np.zeros(96, np.float32))
    assert three.total_instructions == 3 * one.total_instructions
    assert three.instructions["ld_global"] == 3
    assert (
        sum(line["executed"] for line in three.lines()) == three.total_instructions == sum(three.instructions.values())
    )
