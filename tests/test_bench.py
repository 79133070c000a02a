"""The benchmarks that take seconds run, on inputs too small to say anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"


def _run(*command: str) -> str:
    path = os.pathsep.join([str(BENCH.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], cwd=BENCH.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_microbenchmarks() -> None:
    output = _run("-m", "pytest", "-q", "bench/microbenchmarks.py", "--lengths", "48", "80", "--benchmark-disable")
    assert "20 passed" in output


def test_attention(tmp_path: Path) -> None:
    picture = tmp_path / "identification.png"
    result = json.loads(
        _run("bench/attention.py", "--lengths", "40", "80", "--rounds", "2", "--json", "--plot", str(picture))
    )
    assert [r["of"] for r in result["results"] if r["length"] == 40] == [
        "prefill_attn",
        "prefill_attn_lazy",
        "retained_mass",
        "streaming mask",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
