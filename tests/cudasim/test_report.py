"""The report command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cudasim

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(cudasim.nvcc() is None, reason="needs nvcc to compile the kernels")

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import cudasim
cudasim.load_library(sys.argv[1])
k = cudasim.kernel("shared_stride")
for _ in range(2):
    k.launch(1, 32, np.zeros(32, np.float32), 4, shared=32 * 33 * 4)
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cudasim.report", *args], cwd=HERE.parent, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def library() -> Path:
    return cudasim.compile_library(HERE / "kernels" / "patterns.cu")


def test_of_a_library(library: Path) -> None:
    result = run("--json", str(library))
    assert result.returncode == 0, result.stderr
    kernels = {e["kernel"]: e for e in json.loads(result.stdout)}
    assert set(kernels) >= {"shared_stride", "ldmatrix_rows", "global_wide"}
    assert kernels["ldmatrix_rows"]["classes"]["ldmatrix"] == 1
    assert kernels["shared_broadcast"]["static_shared"] == 128
    assert not any(e["unsupported"] for e in kernels.values())
    assert "shared_broadcast" in run(str(library)).stdout


def test_of_a_script(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run("--json", str(script), str(library))
    assert result.returncode == 0, result.stderr
    (entry,) = json.loads(result.stdout)
    assert entry["launches"] == 2
    assert entry["bank_conflicts"] == 2 * 2 * 3
    assert len(entry["conflict_lines"]) == 2
    text = run(str(script), str(library)).stdout
    assert "shared_stride" in text
    assert "patterns.cu:" in text


def test_findings_set_the_exit_status(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("shared=32 * 33 * 4", "shared=64"))
    result = run(str(script), str(library))
    assert result.returncode == 1
    assert "shared_out_of_bounds" in result.stdout
