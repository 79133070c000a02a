"""Two ranks that hold half of the heads each choose and answer as one rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from tensor_parallel_worker import observe

HERE = Path(__file__).parent


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(HERE / "tensor_parallel_worker.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    # The limit turns a hang into a failure; nothing is said about how long a run takes.
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.build(tiny_models.llama()).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch lacks the gloo backend")
def test_two_ranks_answer_as_one(checkpoint: Path, tmp_path: Path) -> None:
    done = launch(checkpoint, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = observe(tiny_models.build(tiny_models.llama()))
    assert all(all(lists) for lists in expected.values()), "a row without a streaming layer tests nothing"
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected, f"rank {rank}"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch lacks the gloo backend")
def test_a_rank_that_fails_ends_the_run(checkpoint: Path, tmp_path: Path) -> None:
    done = launch(checkpoint, tmp_path, 1)
    assert done.returncode != 0
    assert "this rank was told to fail" in done.stderr
