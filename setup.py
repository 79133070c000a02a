"""Builds the ops with CMake and packs them into one wheel for every Python (py3-none-PLATFORM).

Environment:
    LIGHTTRANSFER_CUDA          auto (default: with CUDA if an nvcc is found), on, off
    LIGHTTRANSFER_CUDA_ARCHS    compute capabilities, "80" by default, "80;90" for two
    MAX_JOBS                    compile jobs, by default from cores and memory
    CUDACXX, CUDA_HOME          where to look for nvcc before the PATH and PyPI's nvidia-cuda-nvcc
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
GIB_PER_JOB = 3  # nvcc on a CUTLASS kernel


def find_package(name: str) -> Path | None:
    """The folder of an installed package, without importing it.

    Looks also beside the interpreter, where an isolated build does not: torch's headers are needed, not torch.
    """
    for folder in [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]:
        if folder and (Path(folder) / name).is_dir():
            return Path(folder) / name
    return None


def torch_dir() -> Path:
    torch = find_package("torch")
    if torch is None or not (torch / "include" / "torch" / "csrc" / "stable").is_dir():
        sys.exit(
            "lighttransfer builds against the torch you will run it with: install torch >= 2.11 first, then run "
            "`pip install --no-build-isolation .` again."
        )
    return torch


def find_nvcc() -> Path | None:
    candidates = [os.environ.get("CUDACXX")]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        candidates.append(home and str(Path(home) / "bin" / "nvcc"))
    candidates.append(shutil.which("nvcc"))
    nvidia = find_package("nvidia")
    if nvidia is not None:
        candidates += [str(path) for path in sorted(nvidia.glob("cu*/bin/nvcc"), reverse=True)]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            # A wrapper script on the PATH is not where the toolkit lies: ask nvcc itself.
            probe = subprocess.run([candidate, "--dryrun", "-x", "cu", "-"], capture_output=True, text=True, input="")
            for line in probe.stderr.splitlines():
                if line.startswith("#$ TOP="):
                    return Path(line.removeprefix("#$ TOP=").strip()).resolve() / "bin" / "nvcc"
    return None


def cuda_arguments() -> list[str]:
    mode = os.environ.get("LIGHTTRANSFER_CUDA", "auto")
    if mode not in ("auto", "on", "off"):
        sys.exit(f"LIGHTTRANSFER_CUDA must be auto, on or off, got {mode!r}.")
    nvcc = None if mode == "off" else find_nvcc()
    cutlass = find_package("cutlass_library")
    if mode == "on" and (nvcc is None or cutlass is None):
        missing = "no nvcc was found" if nvcc is None else "CUTLASS' headers were not found"
        sys.exit(
            f"LIGHTTRANSFER_CUDA=on, but {missing}: install a CUDA toolkit and nvidia-cutlass, or what "
            "requirements/cuda.txt lists."
        )
    if nvcc is None or cutlass is None:
        print("lighttransfer: building for the CPU alone (no nvcc and CUTLASS, or LIGHTTRANSFER_CUDA=off)")
        return ["-DNVCC="]
    return [
        f"-DNVCC={nvcc}",
        f"-DCUTLASS_INCLUDE={cutlass / 'source' / 'include'}",
        f"-DCUDA_ARCHS={os.environ.get('LIGHTTRANSFER_CUDA_ARCHS', '80')}",
    ]


def n_jobs() -> int:
    if "MAX_JOBS" in os.environ:
        return int(os.environ["MAX_JOBS"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / GIB_PER_JOB)))


class CMakeBuild(build_ext):
    """Runs CMake in build/cmake (kept, so that a second build is fast) and takes _C.so from there."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"  # no Python ABI in it, so none in its name

    def build_extension(self, ext: Extension) -> None:
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                sys.exit(f"lighttransfer needs {tool} to build: `pip install {tool}`.")
        build = ROOT / "build" / "cmake"
        configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build), f"-DTORCH_DIR={torch_dir()}"]
        subprocess.run([*configure, *cuda_arguments()], check=True)
        subprocess.run(["cmake", "--build", str(build), "-j", str(n_jobs())], check=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file in one step: a process that has the old one loaded keeps it.
        partial = target.with_suffix(".so.partial")
        shutil.copyfile(build / "_C.so", partial)
        partial.replace(target)


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("lighttransfer._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
