"""What the built library and its build promise: one file for every torch, errors that say what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import fatbin
import pytest
import simulator
import torch

from lighttransfer import _library

ROOT = Path(__file__).parent.parent


def _run(*command: str | Path, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)


@pytest.fixture(scope="module")
def library() -> Path:
    return _library.load()


@pytest.fixture(scope="module")
def undefined_symbols(library: Path) -> list[tuple[str, str]]:
    """(type, name) of every symbol the library needs from others."""
    lines = _run("nm", "-D", "--undefined-only", library, check=True).stdout.splitlines()
    return [(kind, name.split("@")[0]) for kind, name in (line.split() for line in lines)]


def test_needs_torch_and_no_cuda(library: Path) -> None:
    dynamic = _run("readelf", "-d", library, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch.so" in needed
    assert not [name for name in needed if re.search(r"cuda|cudart|python|libc10|torch_cpu", name)]
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_only_the_stable_abi_is_used(undefined_symbols: list[tuple[str, str]]) -> None:
    mangled_torch = [name for _, name in undefined_symbols if re.match(r"_Z\w*(2at|3c10|5torch)", name)]
    assert mangled_torch == []
    assert not [name for _, name in undefined_symbols if name.startswith("Py")]


def test_cuda_stream_is_weak(undefined_symbols: list[tuple[str, str]]) -> None:
    stream = [kind for kind, name in undefined_symbols if name == "aoti_torch_get_current_cuda_stream"]
    if not stream:
        pytest.skip("this build has no CUDA objects: LIGHTTRANSFER_CUDA=on builds them")
    assert stream == ["w"]
    others = [name for _, name in undefined_symbols if re.match(r"cuda[A-Z]|__cuda|cu[A-Z]", name)]
    assert others == []


def test_exports_nothing_of_its_own(library: Path) -> None:
    """Ops are found through torch's registry; an exported symbol could only clash."""
    lines = _run("nm", "-DC", "--defined-only", library, check=True).stdout.splitlines()
    assert not [line for line in lines if "lighttransfer::" in line]


def test_targets_torch_2_11() -> None:
    assert "TORCH_TARGET_VERSION=0x020b000000000000" in (ROOT / "CMakeLists.txt").read_text()


@pytest.fixture(scope="module")
def kernels(library: Path) -> fatbin.Kernels:
    found = fatbin.read(library)
    if found is None:
        pytest.skip("this build has no CUDA objects: LIGHTTRANSFER_CUDA=on builds them")
    return found


def test_every_kernel_has_sass_and_ptx(kernels: fatbin.Kernels) -> None:
    assert kernels.problems(80) == []


def test_every_cuda_source_has_kernels_in_the_library(kernels: fatbin.Kernels) -> None:
    """The names in the sources, against a fat binary that was left out of the link."""
    sources = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("**/*.cu*"))
    named = re.findall(r"__global__ void (?:__launch_bounds__\(.*\)\s+)?(\w+)\(", sources)
    assert len(named) == sources.count("__global__")
    assert [name for name in named if not any(f"{len(name)}{name}" in full for full in kernels.sass[80])] == []


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An interpreter that has setuptools and nothing else, and a PATH with CMake and ninja and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", check=True)
    python = folder / "venv" / "bin" / "python"
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    for name in ("setuptools", "_distutils_hack"):
        (site / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("cmake", "ninja"):
        (tools / tool).symlink_to(shutil.which(tool))
    return python, tools


def _build(python: Path, tools: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not re.match("LIGHTTRANSFER|CUDA|PYTHON", k)}
    return _run(python, "setup.py", "-q", "build_ext", cwd=ROOT, env=clean | {"PATH": str(tools)} | env)


def test_without_torch_one_sentence(bare_python: tuple[Path, Path]) -> None:
    result = _build(*bare_python)
    assert result.returncode != 0
    assert "install torch >= 2.11 first" in result.stderr
    assert "Traceback" not in result.stderr


def test_cuda_on_without_nvcc(bare_python: tuple[Path, Path]) -> None:
    python, tools = bare_python
    site = python.parent.parent / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    torch_link = site / "torch"
    torch_link.symlink_to(Path(torch.__file__).parent)
    try:
        result = _build(python, tools, LIGHTTRANSFER_CUDA="on")
        assert result.returncode != 0
        assert "LIGHTTRANSFER_CUDA=on, but no nvcc was found" in result.stderr
        assert "Traceback" not in result.stderr
        result = _build(python, tools, LIGHTTRANSFER_CUDA="maybe")
        assert "LIGHTTRANSFER_CUDA must be auto, on or off, got 'maybe'" in result.stderr
    finally:
        torch_link.unlink()


def test_missing_library_says_how_to_install() -> None:
    code = "import lighttransfer"
    env = os.environ | {"LIGHTTRANSFER_LIBRARY": "no_such_file.so", "PYTHONPATH": str(ROOT)}
    result = _run(sys.executable, "-c", code, env=env)
    assert "ImportError: lighttransfer's compiled ops are missing" in result.stderr
    assert "pip install --no-build-isolation ." in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["--no-build-isolation", "--use-pep517"])
def test_wheel_is_for_every_python(tmp_path: Path, isolation: str) -> None:
    """Also from an isolated build, which has no torch of its own."""
    source = tmp_path / "source"
    files = _run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT, check=True).stdout.splitlines()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    env = os.environ | {"LIGHTTRANSFER_CUDA": "off"}
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", isolation, "-w", tmp_path, source)
    result = _run(*pip, env=env)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"lighttransfer-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in files if name.startswith("lighttransfer/")}
    assert {name for name in names if ".dist-info/" not in name} == {"lighttransfer/_C.so", *package}


@pytest.mark.slow
def test_release_wheel(tmp_path: Path) -> None:
    """A manylinux tag, under 30 MB, and ops that run where nothing but torch is installed."""
    if reason := simulator.missing():
        pytest.skip(reason)
    if shutil.which("auditwheel", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("auditwheel is missing: requirements/test.txt lists it")
    env = {k: v for k, v in os.environ.items() if k != "LIGHTTRANSFER_LIBRARY"} | {"PYTHON": sys.executable}
    result = _run("bash", ROOT / "tests" / "wheel.sh", tmp_path, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"lighttransfer-[\d.]+-py3-none-manylinux_\w+(\.manylinux\w+)*\.whl", wheel.name)
