"""Planted bugs: each is found, by the right check and at its line, and its clean twin gives no finding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cudasim

SOURCE = Path(__file__).parent / "kernels" / "faults.cu"
pytestmark = pytest.mark.skipif(cudasim.nvcc() is None, reason="needs nvcc to compile kernels/faults.cu")


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    cudasim.load_library(cudasim.compile_library(SOURCE))


def kinds(report: cudasim.LaunchReport) -> set[str]:
    return {f.kind for f in report.findings}


def launch(
    name: str, threads: int, itemsize: int = 4, shared: int = 0
) -> tuple[cudasim.LaunchReport, np.ndarray, np.ndarray]:
    """The kernels take an input and an output of up to two items a thread, at least 128 words of 4 bytes."""
    n = max(2 * threads * itemsize // 4, 128)
    x, y = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
    return cudasim.kernel(name).launch(1, threads, x, y, shared=shared), x, y


# name, threads, bytes of an element, dynamic shared memory, the finding, text of the source line that it names
FAULTS = [
    ("missing_syncthreads", 128, 4, 0, "shared_race", "y[threadIdx.x] = s[threadIdx.x & ~32];"),
    ("write_after_read", 64, 4, 0, "shared_race", "s[63 - threadIdx.x]"),
    ("write_after_write", 64, 4, 0, "shared_race", "if (threadIdx.x >= 32) s[threadIdx.x % 32] = x[threadIdx.x];"),
    ("two_lanes_one_word", 32, 4, 0, "shared_race", "s[kBug ? threadIdx.x / 2 : threadIdx.x] = x[threadIdx.x];"),
    ("missing_syncwarp", 32, 4, 0, "shared_race", "y[threadIdx.x] = s[threadIdx.x ^ 1];"),
    ("partial_syncwarp", 32, 4, 0, "shared_race", "y[threadIdx.x] = s[threadIdx.x ^ (kBug ? 16 : 1)];"),
    ("missing_syncwarp_ldmatrix", 32, 16, 0, "shared_race", "ldmatrix"),
    ("missing_wait", 64, 16, 0, "cp_async_in_flight", "y[threadIdx.x] = s[63 - threadIdx.x];"),
    ("wait_allows_one_group_too_many", 64, 16, 0, "cp_async_in_flight", "y[threadIdx.x] = s[63 - threadIdx.x];"),
    ("missing_commit", 64, 16, 0, "cp_async_in_flight", "y[threadIdx.x] = s[63 - threadIdx.x];"),
    ("barrier_before_wait", 64, 16, 0, "shared_race", "y[threadIdx.x] = s[63 - threadIdx.x];"),
    ("copy_over_data_in_use", 64, 16, 0, "shared_race", "y[threadIdx.x] = s[63 - threadIdx.x];"),
    ("in_flight_at_exit", 64, 16, 0, "cp_async_at_exit", "cp.async"),
    ("shared_bounds", 64, 4, 256, "shared_out_of_bounds", "d[threadIdx.x + (kBug ? 1 : 0)] = x[threadIdx.x];"),
    ("misaligned", 32, 16, 0, "misaligned_address", "*reinterpret_cast<const float4*>"),
    ("uninitialized", 64, 4, 0, "shared_uninitialized_read", "y[threadIdx.x] = s[63 - threadIdx.x];"),
    ("wrong_space", 32, 4, 0, "wrong_address_space", "ld.global.u32"),
    ("divergent_barrier", 64, 4, 0, "barrier_divergence", "bar.sync 0;"),
    ("deadlock", 64, 4, 0, "barrier_deadlock", "bar.sync 1, 64;"),
    ("mismatched_count", 96, 4, 0, "barrier_mismatch", "bar.sync 1, "),
    ("overrun", 64, 4, 0, "barrier_overrun", "bar.arrive 1, 64;"),
    ("inactive_shuffle", 32, 4, 0, "shuffle_inactive_lane", "__shfl_xor_sync"),
    ("lanes_never_come", 32, 4, 0, "warp_divergence", ""),
]


@pytest.mark.parametrize(("name", "threads", "itemsize", "shared", "kind", "line"), FAULTS, ids=[f[0] for f in FAULTS])
@pytest.mark.parametrize("seed", [0, 1])
def test_fault_is_found_and_its_twin_is_clean(
    name: str, threads: int, itemsize: int, shared: int, kind: str, line: str, seed: int
) -> None:
    with cudasim.option(seed=seed):
        report, _, _ = launch(f"{name}_bug", threads, itemsize, shared)
        assert kind in kinds(report), report.findings
        assert report.error == 719
        clean, _, _ = launch(f"{name}_clean", threads if name != "mismatched_count" else 64, itemsize, shared)
    assert not clean.findings, clean.findings
    assert clean.error == 0
    finding = next(f for f in report.findings if f.kind == kind)
    assert finding.ptx
    places = [finding.source, *finding.stack]
    source = SOURCE.read_text().splitlines()
    named = [source[int(p.rsplit(":", 1)[1]) - 1] for p in places if p.startswith(str(SOURCE))]
    assert named
    assert any(line in text for text in named) or line in finding.ptx, (named, finding.ptx)


def test_benign_order_does_not_hide_a_race() -> None:
    """The values of the racing kernel are right: it is the clocks that find it."""
    report, x, y = launch("write_after_write_bug", 64)
    assert kinds(report) == {"shared_race"}
    np.testing.assert_array_equal(y[:64], np.tile(x[32:64], 2))


def test_bytes_of_one_word_do_not_race() -> None:
    x, y = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    report = cudasim.kernel("neighbouring_bytes_clean").launch(1, 64, x, y)
    assert not report.findings
    np.testing.assert_array_equal(y, x[::-1])


def test_races_of_bytes_are_found() -> None:
    x, y = np.arange(128, dtype=np.uint8), np.zeros(128, np.uint8)
    assert kinds(cudasim.kernel("racing_bytes_bug").launch(1, 64, x, y)) == {"shared_race"}
    assert not cudasim.kernel("racing_bytes_clean").launch(1, 64, x, y).findings
    np.testing.assert_array_equal(y[:64], x[:64] + 1)


def test_refused_loads_give_nan() -> None:
    report, _, y = launch("uninitialized_bug", 64)
    assert y[0] == -1
    assert report.findings[0].count == 1


@pytest.mark.parametrize(("name", "victim"), [("global_bounds", "x"), ("global_bounds_store", "y")])
def test_global_bounds(name: str, victim: str) -> None:
    storage = {k: np.full(130, 7, np.int32) for k in "xy"}  # one word on each side is not registered
    x, y = storage["x"][1:129], storage["y"][1:129]

    def run(kernel: str) -> cudasim.LaunchReport:
        cudasim.register(x.ctypes.data, x.nbytes, False, "x")
        cudasim.register(y.ctypes.data, y.nbytes, True, "y")
        try:
            addresses = [a.ctypes.data.to_bytes(8, "little") for a in (x, y)]
            return cudasim.kernel(kernel).launch(1, 128, *addresses)
        finally:
            cudasim.unregister(x.ctypes.data)
            cudasim.unregister(y.ctypes.data)

    report = run(f"{name}_bug")
    assert kinds(report) == {"global_out_of_bounds"}
    assert f"{512}-byte buffer {victim}" in report.findings[0].message
    assert (storage["y"][[0, 129]] == 7).all()
    assert not run(f"{name}_clean").findings


def test_read_only_buffers() -> None:
    x, y = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    y.flags.writeable = False
    report = cudasim.kernel("read_only").launch(1, 32, x, y)
    assert kinds(report) == {"global_read_only"}
    assert not y.any()
    y.flags.writeable = True
    assert not cudasim.kernel("read_only").launch(1, 32, x, y).findings
    np.testing.assert_array_equal(y, x)


def test_unregistered_memory_may_be_allowed() -> None:
    x, y = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    addresses = [a.ctypes.data.to_bytes(8, "little") for a in (x, y)]
    assert kinds(cudasim.kernel("read_only").launch(1, 32, *addresses)) == {"global_out_of_bounds"}
    with cudasim.option(strict_memory=False):
        assert not cudasim.kernel("read_only").launch(1, 32, *addresses).findings
    np.testing.assert_array_equal(y, x)


def test_dynamic_shared_memory_needs_its_attribute() -> None:
    report, _, _ = launch("shared_bounds_clean", 64, shared=49153)
    assert kinds(report) == {"launch_limits"}
    assert "49153 bytes of dynamic shared memory" in report.findings[0].message
    kernel = cudasim.kernel("shared_bounds_clean")
    kernel.set_max_dynamic_shared(100 * 1024)
    try:
        assert not launch("shared_bounds_clean", 64, shared=49153)[0].findings
        assert kinds(launch("shared_bounds_clean", 64, shared=200 * 1024)[0]) == {"launch_limits"}
    finally:
        kernel.set_max_dynamic_shared(48 * 1024)


@pytest.mark.parametrize(("kernel", "threads"), [("read_only", 1056), ("bounded", 160), ("read_only", 0)])
def test_block_size_limits(kernel: str, threads: int) -> None:
    report, _, _ = launch(kernel, threads)
    assert kinds(report) == {"launch_limits"}
    assert report.total_instructions == 0
    assert not launch("bounded", 128)[0].findings


def test_instruction_limit_ends_an_endless_loop() -> None:
    with cudasim.option(max_instructions=100_000):
        report, _, _ = launch("endless_bug", 64)
        assert kinds(report) == {"instruction_limit"}
        assert report.total_instructions < 300_000
        assert not launch("endless_clean", 64)[0].findings


def test_traps() -> None:
    x, y = np.zeros(32, np.int32), np.zeros(32, np.int32)
    assert not cudasim.kernel("traps").launch(1, 32, x, y).findings
    x[7] = 12345
    report = cudasim.kernel("traps").launch(1, 32, x, y)
    assert [(f.kind, f.thread) for f in report.findings] == [("trap", 7)]


def test_an_unknown_instruction_is_a_finding_where_it_is_executed() -> None:
    cudasim.load_ptx("""
.version 9.0
.target sm_80
.address_size 64
.visible .entry unknown_instruction(.param .u32 go) {
.reg .b32 %r<2>; .reg .pred %p;
ld.param.u32 %r0, [go];
setp.ne.u32 %p, %r0, 0;
@%p quantum.entangle.u32 %r1, %r0;
ret;
}""")
    assert not cudasim.kernel("unknown_instruction").launch(1, 32, 0).findings
    report = cudasim.kernel("unknown_instruction").launch(1, 32, 1)
    assert kinds(report) == {"unsupported_instruction"}
    assert "quantum.entangle" in report.findings[0].ptx


def test_findings_do_not_leak_into_the_next_launch() -> None:
    launch("missing_wait_bug", 64, 16)
    launch("in_flight_at_exit_bug", 64, 16)
    for _ in range(3):
        assert not launch("missing_wait_clean", 64, 16)[0].findings


class TestMutants:
    def test_every_deletion_is_caught(self) -> None:
        name = "copy_over_data_in_use_clean"
        found = cudasim.mutants(name)
        assert [m.ptx.split()[0].rstrip(";") for m in found] == [
            "bar.sync", "bar.sync", "cp.async.commit_group", "cp.async.wait_group", "bar.sync",
        ]  # fmt: skip
        for mutant in found:
            with cudasim.apply_mutant(name, mutant):
                report, _, _ = launch(name, 64, 16)
            assert report.findings, mutant
        assert not launch(name, 64, 16)[0].findings
