"""A PTX simulator: runs kernels that nvcc compiled for sm_80 on the CPU, with checks and counters. See README.md."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._build import BUILD_DIR, build_ops, compile_library, ensure_built, nvcc

ensure_built()
if str(BUILD_DIR) not in sys.path:
    sys.path.append(str(BUILD_DIR))

import _cudasim  # noqa: E402
from _cudasim import (  # noqa: E402
    Finding,
    LaunchReport,
    Mutant,
    PtxError,
    kernels,
    load_ptx,
    options,
    read_ptx_file,
    register,
    unregister,
)

LIBRARY = BUILD_DIR / "libcudasim.so"

__all__ = [
    "BUILD_DIR",
    "LIBRARY",
    "Finding",
    "Kernel",
    "LaunchReport",
    "Mutant",
    "PtxError",
    "apply_mutant",
    "buffer",
    "compile_library",
    "kernel",
    "kernels",
    "load_library",
    "load_ops",
    "load_ptx",
    "mutants",
    "nvcc",
    "option",
    "options",
    "read_ptx_file",
    "record",
    "register",
    "reports",
    "unregister",
]


def load_library(path: str | Path) -> ctypes.CDLL:
    """Loads a library that was linked with libcudasim.so; its kernels become known by name."""
    return ctypes.CDLL(str(path))


def load_ops(build: Path | None = None, library: Path | None = None) -> Path:
    """Loads ``torch.ops.lighttransfer_sim``, the project's CUDA kernels for CPU tensors: ``library``, or builds it."""
    import torch

    path = library or build_ops(build)
    torch.ops.load_library(str(path))
    _mirror_fakes()
    return path


def _mirror_fakes() -> None:
    """The fake kernels of the real ops serve the simulated ones."""
    import torch
    from torch._library.simple_registry import singleton

    import lighttransfer  # noqa: F401  (registers them)

    for entry in list(singleton._data.values()):
        namespace, _, name = entry.qualname.partition("::")
        if namespace == "lighttransfer" and entry.fake_impl.kernel is not None:
            torch.library.register_fake(f"lighttransfer_sim::{name}", entry.fake_impl.kernel.func)


def _span(array: Any) -> tuple[int, int, bool]:
    """Address, bytes and writability of a numpy array or a CPU tensor (its whole storage)."""
    if hasattr(array, "untyped_storage"):
        storage = array.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), True
    base = array
    while getattr(base, "base", None) is not None and hasattr(base.base, "__array_interface__"):
        base = base.base
    return base.__array_interface__["data"][0], base.nbytes, bool(array.flags.writeable)


@contextmanager
def buffer(*arrays: Any, writable: bool | None = None) -> Iterator[None]:
    """Registers the memory of numpy arrays or CPU tensors for the duration of a with block."""
    spans = [_span(a) for a in arrays]
    for address, nbytes, can_write in spans:
        register(address, nbytes, can_write if writable is None else writable, "")
    try:
        yield
    finally:
        for address, nbytes, _ in spans:
            if nbytes:
                unregister(address)


class _Recorder:
    def __init__(self) -> None:
        self.reports: list[LaunchReport] = []

    @property
    def findings(self) -> list[Finding]:
        return [f for r in self.reports for f in r.findings]

    @property
    def report(self) -> LaunchReport:
        """The only launch's report."""
        if len(self.reports) != 1:
            raise ValueError(f"expected one launch, recorded {len(self.reports)}")
        return self.reports[0]


_recorders: list[_Recorder] = []


def _drain() -> None:
    launches = list(_cudasim.reports(True))
    for recorder in _recorders:
        recorder.reports.extend(launches)


@contextmanager
def record() -> Iterator[_Recorder]:
    """Collects the reports of the launches inside a with block, whoever makes them. Blocks nest."""
    recorder = _Recorder()
    _drain()
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _drain()
        _recorders.remove(recorder)


def reports(clear: bool = False) -> list[LaunchReport]:
    """The launches since the reports were last cleared or collected by record(), oldest first."""
    return list(_cudasim.reports(clear))


@contextmanager
def option(**values: Any) -> Iterator[None]:
    """Sets options (max_instructions, seed, threads, strict_memory, race_check) for the duration of a with block."""
    current = options()
    before = {name: getattr(current, name) for name in values}
    try:
        for name, value in values.items():
            setattr(current, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(current, name, value)


class Kernel:
    """A loaded kernel, found by its (mangled) name or by a part that only one name contains."""

    def __init__(self, name: str) -> None:
        self.name: str = _cudasim.kernel_name(name)

    @property
    def info(self) -> dict[str, Any]:
        return dict(_cudasim.kernel_info(self.name))

    def set_max_dynamic_shared(self, nbytes: int) -> None:
        """cudaFuncSetAttribute(..., cudaFuncAttributeMaxDynamicSharedMemorySize, nbytes)."""
        _cudasim.set_max_dynamic_shared(self.name, nbytes)

    def launch(
        self, grid: int | Sequence[int], block: int | Sequence[int], *args: Any, shared: int = 0
    ) -> LaunchReport:
        """Launches with arrays, CPU tensors, ints, floats or bytes as arguments; memory is registered meanwhile."""
        sizes = _cudasim.param_sizes(self.name)
        arrays = [a for a in args if not isinstance(a, int | float | bytes)]
        packed = [self._pack(a, s) for a, s in zip(args, sizes, strict=True)]
        with buffer(*arrays):
            return _cudasim.launch(self.name, _triple(grid), _triple(block), packed, shared)

    @staticmethod
    def _pack(value: Any, size: int) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, float):
            return struct.pack("<d" if size == 8 else "<f", value)
        if isinstance(value, int):
            return (value % (1 << (8 * size))).to_bytes(size, "little")
        address = value.data_ptr() if hasattr(value, "data_ptr") else value.__array_interface__["data"][0]
        return struct.pack("<Q", address)


def _triple(value: int | Sequence[int]) -> list[int]:
    dims = [value] if isinstance(value, int) else list(value)
    return dims + [1] * (3 - len(dims))


def kernel(name: str) -> Kernel:
    return Kernel(name)


def mutants(name: str) -> list[Mutant]:
    """The barriers, cp.async waits and commits of a kernel: each one's deletion should be caught by some test."""
    return list(_cudasim.mutants(name))


@contextmanager
def apply_mutant(name: str, mutant: Mutant | int) -> Iterator[None]:
    """Deletes one instruction of a kernel for the duration of a with block."""
    _cudasim.set_mutant(name, mutant if isinstance(mutant, int) else mutant.index)
    try:
        yield
    finally:
        _cudasim.set_mutant(name, -1)
