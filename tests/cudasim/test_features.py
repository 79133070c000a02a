"""Control flow, warp functions, address spaces, calls and host code of kernels that nvcc compiled."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest

import cudasim

SOURCE = Path(__file__).parent / "kernels" / "features.cu"
pytestmark = pytest.mark.skipif(cudasim.nvcc() is None, reason="needs nvcc to compile kernels/features.cu")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return cudasim.load_library(cudasim.compile_library(SOURCE))


@pytest.fixture(params=[0, 1, 2, 3], ids=lambda s: f"seed{s}")
def schedule(request: pytest.FixtureRequest) -> object:
    """Results must not depend on the order in which warps run."""
    with cudasim.option(seed=request.param):
        yield request.param


def launch(name: str, grid: object, block: object, *args: object, shared: int = 0) -> cudasim.LaunchReport:
    report = cudasim.kernel(name).launch(grid, block, *args, shared=shared)
    assert not report.findings, report.findings
    return report


def ints(*shape: int, seed: int = 0, low: int = -100, high: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


@pytest.mark.usefixtures("library")
class TestControlFlow:
    def test_divergent_loops(self, schedule: int) -> None:
        start = ints(200, low=1, high=2000)
        steps = np.full(200, -1, np.int32)
        launch("collatz", 4, 64, start, steps, 200)

        def count(x: int) -> int:
            n = 0
            while x != 1:
                x, n = (3 * x + 1 if x % 2 else x // 2), n + 1
            return n

        np.testing.assert_array_equal(steps, [count(int(x)) for x in start])

    def test_jump_table(self) -> None:
        op, x = ints(64, low=0, high=9), ints(64, seed=1)
        y = np.zeros(64, np.int32)
        launch("dense_switch", 1, 64, op, x, y)
        cases = [
            lambda v: v * 3 + 1,
            lambda v: v ^ 0x55,
            lambda v: (v & 0xFFFFFFFF).bit_count(),
            lambda v: -v,
            lambda v: v * v,
            lambda v: int(v / 7),
            lambda v: int(np.fmod(v, 11)),
        ]
        expected = [cases[o](int(v)) if o < 7 else 1234 for o, v in zip(op, x, strict=True)]
        np.testing.assert_array_equal(y, expected)

    def test_special_registers(self) -> None:
        out = np.zeros((2 * 3 * 2, 40), np.int32)
        launch("special_registers", (2, 3, 2), (5, 4, 2), out)
        t = np.arange(40)
        np.testing.assert_array_equal(out, np.broadcast_to(t * 1000 + t % 32 * 10 + 1, out.shape))


@pytest.mark.usefixtures("library")
class TestWarps:
    def test_reductions_scans_and_votes(self, schedule: int) -> None:
        x = np.random.default_rng(0).integers(-3, 4, 128).astype(np.float32)
        total, prefix = np.zeros_like(x), np.zeros_like(x)
        ballot, any_all = np.zeros(128, np.uint32), np.zeros(128, np.int32)
        launch("warp_reduce", 2, 64, x, total, prefix, ballot, any_all)
        warps = x.reshape(4, 32)
        np.testing.assert_array_equal(total.reshape(4, 32), np.repeat(warps.sum(1)[:, None], 32, 1))
        np.testing.assert_array_equal(prefix.reshape(4, 32), warps.cumsum(1))
        bits = [sum(1 << i for i in range(32) if w[i] > 0) for w in warps]
        np.testing.assert_array_equal(ballot.reshape(4, 32)[:, 0], bits)
        np.testing.assert_array_equal(any_all.reshape(4, 32)[:, 3], (warps > 2).any(1) + 2 * (warps > -2).all(1))

    def test_match_reduce_and_segmented_shuffles(self) -> None:
        key = ints(32, low=0, high=5)
        match, outs = np.zeros(32, np.uint32), [np.zeros(32, np.int32) for _ in range(3)]
        launch("warp_groups", 1, 32, key, match, *outs)
        np.testing.assert_array_equal(match, [sum(1 << j for j in range(32) if key[j] == k) for k in key])
        lane = np.arange(32)
        np.testing.assert_array_equal(outs[0], key.sum())
        np.testing.assert_array_equal(outs[1], key[lane // 8 * 8 + (lane // 8) % 8])
        np.testing.assert_array_equal(outs[2], key[np.where(lane % 16 + 2 < 16, lane + 2, lane)])

    def test_shuffles_on_both_sides_of_a_branch(self) -> None:
        x, y = ints(32), np.zeros(32, np.int32)
        launch("divergent_shuffle", 1, 32, x, y)
        lane = np.arange(32)
        v = np.where(lane % 2 == 1, x + x[lane ^ 2], x - x[lane ^ 4])
        np.testing.assert_array_equal(y, v + v[0])

    def test_block_votes(self, schedule: int) -> None:
        x = ints(256, low=-4, high=5)
        count, every, some = (np.zeros(256, np.int32) for _ in range(3))
        launch("block_vote", 4, 64, x, count, every, some)
        blocks = x.reshape(4, 64)
        np.testing.assert_array_equal(count.reshape(4, 64)[:, 5], (blocks > 0).sum(1))
        np.testing.assert_array_equal(every.reshape(4, 64)[:, 6], (blocks > -3).all(1))
        np.testing.assert_array_equal(some.reshape(4, 64)[:, 7], (blocks > 3).any(1))


@pytest.mark.usefixtures("library")
class TestMemory:
    def test_shared_and_global_atomics(self, schedule: int) -> None:
        x, bins = ints(1000, low=0, high=16), np.zeros(16, np.int32)
        launch("histogram", 3, 96, x, bins, 1000)
        np.testing.assert_array_equal(bins, np.bincount(x, minlength=16))

    def test_every_atomic(self) -> None:
        x = ints(32, low=0, high=1000)
        out = np.array([5000, -1, 0, 0, -1, 0, 0, 0], np.int32)
        fout, lout = np.zeros(1, np.float32), np.zeros(1, np.uint64)
        launch("atomics", 1, 32, x, out, fout, lout)
        expected = [
            x.min(),
            x.max(),
            np.bitwise_xor.reduce(x),
            np.bitwise_or.reduce(x),
            np.bitwise_and.reduce(x),
            32 % 10,
            77,
            x.sum(),
        ]
        np.testing.assert_array_equal(out, expected)
        assert fout[0] == x.sum() * 0.5
        assert lout[0] == int(x.sum()) << 33

    def test_local_arrays_and_calls(self) -> None:
        x, y = ints(16), np.zeros(64, np.int32)
        launch("local_arrays", 1, 64, x, y)
        expected = [sum(int(x[(t + 5 * k) % 16]) * (t + 1) + 1 for k in range(4)) for t in range(64)]
        np.testing.assert_array_equal(y, expected)

    @pytest.mark.parametrize("parity", [0, 1])
    def test_generic_pointers(self, parity: int) -> None:
        x, y = ints(64), np.zeros(64, np.int32)
        launch("generic_pointers", 1, 64, x, y, parity)
        lane = np.arange(64)
        np.testing.assert_array_equal(y, np.where(lane % 2 == parity, 2, 1) * x[63 - lane])

    def test_struct_parameters(self) -> None:
        packed = struct.pack("<3h2xdb7x", 3, 5, 7, 2.5, 9)
        out = np.zeros(2)
        launch("struct_parameter", 1, 1, packed, packed, out)
        np.testing.assert_array_equal(out, [3 + 7 * 2.5 + 9, 5 + 2.5])

    def test_cp_async_groups_and_zero_fill(self, schedule: int) -> None:
        x = np.random.default_rng(0).standard_normal((128, 4)).astype(np.float32)
        y = np.zeros_like(x)
        launch("async_copies", 1, 64, x, y, 8, shared=2048)
        next_lane = (np.arange(64) + 1) % 64
        np.testing.assert_array_equal(y[:64], x[next_lane])
        second = x[64:].copy()
        second[0::2] = 0
        second[1::2, 2:] = 0
        np.testing.assert_array_equal(y[64:], second[next_lane])

    def test_named_barriers(self, schedule: int) -> None:
        x, y = ints(64), np.zeros(64, np.int32)
        launch("producer_consumer", 1, 128, x, y)
        np.testing.assert_array_equal(y, (x + 1) * 10)


class TestHostCode:
    def test_launches_by_stub(self, library: ctypes.CDLL) -> None:
        x = np.arange(1000, dtype=np.float32)
        with cudasim.buffer(x), cudasim.record() as log:
            status = library.host_scale(ctypes.c_void_p(x.ctypes.data), ctypes.c_float(3), 1000, 128)
        assert status == 0
        assert (log.report.grid, log.report.block) == ((8, 1, 1), (128, 1, 1))
        np.testing.assert_array_equal(x, np.arange(1000) * 3)

    def test_a_refused_launch_is_an_error_of_the_host(self, library: ctypes.CDLL) -> None:
        x = np.zeros(4096, np.float32)
        with cudasim.buffer(x), cudasim.record() as log:
            status = library.host_scale(ctypes.c_void_p(x.ctypes.data), ctypes.c_float(3), 4096, 2048)
        assert status == 9
        assert [f.kind for f in log.findings] == ["launch_limits"]

    def test_symbols_and_device_memory(self, library: ctypes.CDLL) -> None:
        out, table = np.zeros(32, np.float32), np.arange(8, dtype=np.float32) / 4
        with cudasim.buffer(out):
            assert library.host_symbols(ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(table.ctypes.data), 100) == 0
        expected = table[np.arange(32) % 8] + 100
        expected[0] = 4321
        np.testing.assert_array_equal(out, expected)

    def test_printf(self, library: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> None:
        launch("say", 1, 2, 40, 2.5)
        assert capfd.readouterr().out == "thread 40 says 2.50 and text%\nthread 41 says 2.50 and text%\n"

    def test_assertions_are_findings(self, library: ctypes.CDLL) -> None:
        launch("asserts", 1, 32, 3)
        report = cudasim.kernel("asserts").launch(1, 32, 4)
        assert [f.kind for f in report.findings] == ["assertion"]
        assert "x <= 3" in report.findings[0].message
