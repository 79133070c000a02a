"""Heads split over two processes: every rank chooses the layers, and says the tokens, of one process with all heads."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny_models

import lighttransfer

POLICIES = ["lazy_ratio", "nonsink_peak", "output_error"]
SETTINGS = {"full_layers": 2, "n_sink": 2, "n_recent": 6, "n_last": 4, "page_size": 4}


def answers(model: Any) -> dict[str, Any]:
    # The last row is inside the window: it chooses while it decodes.
    ids, mask = tiny_models.left_pad([tiny_models.prompt(length, seed=length) for length in (30, 23, 5)])
    result = {}
    # A rank holds its share of the heads, so its share of the bytes: 32 pages of four tokens.
    n_bytes = 32 * 4 * 2 * 2 * 16 * 4 // int(os.environ.get("WORLD_SIZE", "1"))
    later = {"policy": "lazy_ratio", "full_layers": 3, "reselect_every": 4, "reselect_bytes": n_bytes}
    changes = {**{policy: {"policy": policy} for policy in POLICIES}, "reselect_every": later}
    for policy, settings in changes.items():
        lighttransfer.enable(model, **{**SETTINGS, **settings})
        out = model.generate(ids, attention_mask=mask, max_new_tokens=15, do_sample=False, return_dict_in_generate=True)
        report = out.cache.report()
        result[policy] = {
            "tokens": out.sequences.tolist(),
            "streaming": [request.streaming_layers for request in report.requests],
            "bytes": report.bytes_in_use,
        }
    return result


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    # The limit turns a hang into a failure; nothing is said about how long a run takes.
    return subprocess.run(
        [*command, str(folder), *arguments], env=environment, capture_output=True, text=True, timeout=400
    )


def test_two_ranks_choose_as_one(tmp_path: Path) -> None:
    model = tiny_models.build(tiny_models.llama())
    model.save_pretrained(tmp_path / "model")
    expected = answers(model)
    assert any(row != expected["lazy_ratio"]["streaming"][0] for row in expected["output_error"]["streaming"])
    assert all(row for result in expected.values() for row in result["streaming"])
    assert [len(row) for row in expected["reselect_every"]["streaming"]] == [3, 3, 2]
    run = launch(tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in (0, 1):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for policy in expected:
            assert result[policy]["streaming"] == expected[policy]["streaming"]
            assert result[policy]["tokens"] == expected[policy]["tokens"]
            assert 2 * result[policy]["bytes"] == expected[policy]["bytes"]


def test_a_rank_that_fails_ends_the_run(tmp_path: Path) -> None:
    """In the middle of an answer, while the other rank waits for its share of a sum."""
    tiny_models.build(tiny_models.llama()).save_pretrained(tmp_path / "model")
    run = launch(tmp_path, "1")
    assert run.returncode != 0
    assert "rank 1 was told to fail" in run.stderr


def main(folder: Path, failing_rank: str = "") -> None:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=DistributedConfig(tp_size=2))
    if os.environ["RANK"] == failing_rank:
        calls = itertools.count()

        def fail(*_: object) -> None:
            if next(calls) == 7:  # the prompt and six decode steps are done
                raise RuntimeError(f"rank {failing_rank} was told to fail")

        model.model.layers[2].register_forward_pre_hook(fail)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(answers(model)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
