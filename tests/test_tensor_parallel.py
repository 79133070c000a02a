"""Heads split over two processes: every rank chooses the layers, and says the tokens, of one process with all heads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny_models
import torch

import lighttransfer

POLICIES = ["lazy_ratio", "nonsink_peak", "output_error"]
SETTINGS = {"full_layers": 2, "n_sink": 2, "n_recent": 6, "n_last": 4, "page_size": 4}


def answers(model: Any) -> dict[str, Any]:
    ids = torch.tensor([tiny_models.prompt(30, seed=3), tiny_models.prompt(30, seed=4)])
    result = {}
    for policy in POLICIES:
        lighttransfer.enable(model, policy=policy, **SETTINGS)
        out = model.generate(ids, max_new_tokens=15, do_sample=False, return_dict_in_generate=True)
        report = out.cache.report()
        result[policy] = {
            "tokens": out.sequences.tolist(),
            "streaming": [request.streaming_layers for request in report.requests],
            "bytes": report.bytes_in_use,
        }
    return result


def test_two_ranks_choose_as_one(tmp_path: Path) -> None:
    model = tiny_models.build(tiny_models.llama())
    model.save_pretrained(tmp_path / "model")
    expected = answers(model)
    assert any(row != expected["lazy_ratio"]["streaming"][0] for row in expected["output_error"]["streaming"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    run = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in (0, 1):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for policy in POLICIES:
            assert result[policy]["streaming"] == expected[policy]["streaming"]
            assert result[policy]["tokens"] == expected[policy]["tokens"]
            assert 2 * result[policy]["bytes"] == expected[policy]["bytes"]


def main(folder: Path) -> None:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=DistributedConfig(tp_size=2))
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(answers(model)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
