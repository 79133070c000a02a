"""One rank of test_tensor_parallel.py: loads its shard of a model, generates, writes what it saw.

``python -m torch.distributed.run --nproc-per-node 2 tensor_parallel_worker.py MODEL OUT [FAILING_RANK]``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hybrid_runs as runs
import tiny_models
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import lighttransfer

PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 5))]
POLICIES = ("lazy_ratio", "nonsink_peak")  # reduced over the ranks as a mean and as a maximum


def observe(model: transformers.PreTrainedModel) -> dict[str, list[list[int]]]:
    """Per policy the answers and the choices of a batch whose last row decides while it decodes."""
    seen = {}
    for policy in POLICIES:
        lighttransfer.enable(model, full_layers=2, n_last=runs.N_LAST, policy=policy, **runs.WINDOW)
        run = runs.generate(model, PROMPTS, 20)
        seen[policy] = [*run.answers, *(sorted(layers) for layers in runs.streaming(run.cache))]
    return seen


def main(folder: str, out: str, failing_rank: str = "-1") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = DistributedConfig(tp_size=dist.get_world_size())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    if rank == int(failing_rank):
        raise RuntimeError("this rank was told to fail")
    Path(out, f"{rank}.json").write_text(json.dumps(observe(model)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
