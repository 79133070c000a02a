"""Builds the simulator on first use, and CUDA sources against it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
BUILD_DIR = Path(os.environ.get("CUDASIM_BUILD_DIR", SOURCE_DIR.parents[1] / "build" / "cudasim"))
NVCC_FLAGS = ("-gencode", "arch=compute_80,code=[sm_80,compute_80]", "-no-compress", "-lineinfo", "-std=c++17")
#: x86-64-v3 by the names of /proc/cpuinfo; what v2 has comes with them.
X86_64_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})


def instruction_set(machine: str, cpuinfo: str) -> str:
    """The ``-march`` to build for: x86-64-v3 where the CPU has it, else the compiler's default, an empty string."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    is_v3 = machine in ("x86_64", "AMD64") and flags is not None and set(flags[1].split()) >= X86_64_V3
    return "x86-64-v3" if is_v3 else ""


def _this_instruction_set() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    return instruction_set(platform.machine(), cpuinfo.read_text() if cpuinfo.exists() else "")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise RuntimeError(f"cudasim needs {name}, which is neither beside {sys.executable} nor in PATH")
    return found


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    result = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout[-8000:]}")


def ensure_built() -> Path:
    """Builds libcudasim.so and _cudasim in BUILD_DIR, or does nothing when they are newer than their sources and were
    built for an instruction set that this CPU has."""
    with _locked(BUILD_DIR):
        built = list(BUILD_DIR.glob("_cudasim*.so"))
        sources = [SOURCE_DIR / "CMakeLists.txt", *(SOURCE_DIR / "src").iterdir()]
        march, cache = _this_instruction_set(), BUILD_DIR / "CMakeCache.txt"
        configured = cache.exists() and f"CUDASIM_MARCH:STRING={march}\n" in cache.read_text()
        if built and configured and built[0].stat().st_mtime > max(s.stat().st_mtime for s in sources):
            return BUILD_DIR
        if not configured or not (BUILD_DIR / "build.ninja").exists():
            ninja = f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"
            _run(
                [
                    _tool("cmake"),
                    "-G",
                    "Ninja",
                    ninja,
                    f"-DPython_EXECUTABLE={sys.executable}",
                    f"-DCUDASIM_MARCH={march}",
                    "-S",
                    str(SOURCE_DIR),
                    "-B",
                    str(BUILD_DIR),
                ]
            )
        _run([_tool("ninja"), "-C", str(BUILD_DIR), "-j", str(min(4, os.cpu_count() or 1))])
        module = next(BUILD_DIR.glob("_cudasim*.so"))
        os.utime(module)  # a source may have changed without a new link
    return BUILD_DIR


def nvcc() -> str | None:
    """The CUDA compiler: $CUDACXX, the one in PATH, or the one from PyPI; None where there is none."""
    named = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if named:
        return named
    for folder in map(Path, sys.path):
        if (found := folder / "nvidia" / "cu13" / "bin" / "nvcc").exists():
            return str(found)
    return None


def compile_library(source: Path, include: Sequence[Path] = (), flags: Sequence[str] = ()) -> Path:
    """Compiles a .cu file into a shared library that runs on the simulator; cached by the source's content."""
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("no nvcc: neither CUDACXX, PATH nor site-packages/nvidia/cu13/bin has one")
    command = [compiler, *NVCC_FLAGS, "-Xcompiler", "-fPIC", *flags, *(f"-I{i}" for i in include)]
    key = hashlib.sha256(source.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    folder = BUILD_DIR / "kernels"
    library = folder / f"{source.stem}-{key}.so"
    with _locked(folder):
        if not library.exists():
            obj = library.with_suffix(".o")
            _run([*command, "-c", str(source), "-o", str(obj)])
            link = [
                "g++",
                "-shared",
                "-o",
                str(library),
                str(obj),
                "-L",
                str(BUILD_DIR),
                "-lcudasim",
                f"-Wl,-rpath,{BUILD_DIR}",
            ]
            _run(link)
    return library


def build_ops(build: Path | None = None) -> Path:
    """The project's ops over the CUDA launchers: target ``_sim`` of its CMake build, ``build/cmake`` by default."""
    ensure_built()
    root = SOURCE_DIR.parents[1]
    build = build or Path(os.environ.get("LIGHTTRANSFER_BUILD_DIR", root / "build" / "cmake"))
    if not (build / "build.ninja").exists():
        raise RuntimeError(f"{build} holds no build of the project: run `LIGHTTRANSFER_CUDA=on pip install -e .` first")
    with _locked(BUILD_DIR):
        _run([_tool("cmake"), "--build", str(build), "--target", "_sim"])
    return build / "_sim.so"
