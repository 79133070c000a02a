"""A CUTLASS GEMM as it comes: right values, no finding, under any schedule."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest
import torch

import cudasim

SOURCE = Path(__file__).parent / "kernels" / "gemm.cu"


def _include() -> Path | None:
    spec = importlib.util.find_spec("cutlass_library")
    return Path(spec.origin).parent / "source" / "include" if spec and spec.origin else None


pytestmark = pytest.mark.skipif(
    cudasim.nvcc() is None or _include() is None, reason="needs nvcc and nvidia-cutlass to compile kernels/gemm.cu"
)


@pytest.fixture(scope="module")
def gemm() -> ctypes.CDLL:
    include = _include()
    assert include is not None
    return cudasim.load_library(cudasim.compile_library(SOURCE, include=[include]))


def run(gemm: ctypes.CDLL, m: int, n: int, k: int) -> tuple[cudasim.LaunchReport, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(m, n)
    expected = 1.5 * a.double() @ b.double().T - 0.5 * c.double()
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)]
    with cudasim.buffer(a, b, writable=False), cudasim.buffer(c), cudasim.record() as log:
        status = gemm.gemm(m, n, k, *pointers, ctypes.c_float(1.5), ctypes.c_float(-0.5))
    report = log.report
    assert (status == 0) == (not report.findings)
    return report, c, expected


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_whole_tiles(gemm: ctypes.CDLL, seed: int) -> None:
    with cudasim.option(seed=seed):
        report, c, expected = run(gemm, 256, 128, 160)
    assert not report.findings, report.findings
    assert torch.allclose(c.double(), expected, rtol=1e-4, atol=1e-4)
    assert report.grid == (2, 1, 1)
    # 2 tiles; 4 warps, each with 4 x 8 products of 16 x 8; 10 steps of depth 16
    assert report.instructions["mma"] == 2 * 4 * (4 * 8) * 10
    assert report.bank_conflicts == 0


@pytest.mark.parametrize("shape", [(128, 128, 64), (200, 136, 96), (8, 8, 8)])
def test_partial_tiles(gemm: ctypes.CDLL, shape: tuple[int, int, int]) -> None:
    """CUTLASS loads fragments of rows and stages that it has not filled, and does not use them: only that is found."""
    report, c, expected = run(gemm, *shape)
    assert {f.kind for f in report.findings} <= {"shared_uninitialized_read"}, report.findings
    assert torch.allclose(c.double(), expected, rtol=1e-4, atol=1e-4)
