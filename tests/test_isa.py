"""One kernel source per instruction set: the copies agree, and none leaks into code that every CPU runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import simulator
import torch

from lighttransfer import _library
from lighttransfer.ops import cpu_isa

ISAS = ["baseline", "avx2", "avx512"]

PROGRAM = """
import sys
import torch
from lighttransfer.ops import cpu_isa, merge_states, streaming_decode

results = {"isa": cpu_isa()}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for n_heads, n_kv_heads, head_dim in ((8, 2, 128), (5, 1, 72), (3, 3, 8), (6, 2, 256)):
        g = torch.Generator().manual_seed(head_dim)
        q, k, v = (torch.randn(3, 1, n, head_dim, generator=g).to(dtype) for n in (n_heads, n_kv_heads, n_kv_heads))
        cache = torch.randn(2, 3, 600, n_kv_heads, head_dim, generator=g).to(dtype)
        seq_len, n_recent = (torch.tensor(x, dtype=torch.int32) for x in ([599, 900, 3], [0, 301, 0]))
        out, lse, mass = streaming_decode(q, k, v, *cache, seq_len, n_sink=3, n_recent=n_recent, mass_n_recent=50)
        merged, merged_lse = merge_states(out, lse, q, lse + 1)
        results[f"{dtype}, {head_dim}"] = [x.float() for x in (out, lse, mass, merged, merged_lse)]
torch.save(results, sys.argv[1])
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each instruction set that this CPU has computes from the same inputs."""
    by_isa = {}
    for isa in ISAS[: ISAS.index(cpu_isa()) + 1]:
        path = tmp_path_factory.mktemp("isa") / f"{isa}.pt"
        environment = os.environ | {"LIGHTTRANSFER_CPU_ISA": isa, "LIGHTTRANSFER_LIBRARY": str(_library.load())}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        subprocess.run([sys.executable, "-c", PROGRAM, str(path)], env=environment, check=True)
        by_isa[isa] = torch.load(path)
    return by_isa


def test_the_environment_lowers_the_instruction_set(results):
    assert {isa: result["isa"] for isa, result in results.items()} == {isa: isa for isa in results}


def test_all_agree(results):
    want = results["baseline"]
    for isa, result in results.items():
        for name in want.keys() - {"isa"}:
            dtype = getattr(torch, name.split(",")[0].removeprefix("torch."))
            for i, (a, b) in enumerate(zip(result[name], want[name], strict=True)):
                # Outputs round to dtype, so they may differ by one step; the rest is fp32 throughout.
                eps = torch.finfo(dtype if i in (0, 3) else torch.float32).eps
                rtol, atol = (eps, eps) if i in (0, 3) else (8 * eps, 8 * eps)
                torch.testing.assert_close(
                    a, b, rtol=rtol, atol=max(atol, 2e-6), msg=lambda m, at=f"{isa}, {name}": f"{at}: {m}"
                )


def test_no_copy_emits_symbols_that_others_share():
    """A weak function compiled for AVX-512 could be the one that the linker keeps for everybody."""
    objects = [
        path for isa in ISAS for path in simulator.build_folder().glob(f"CMakeFiles/lighttransfer_cpu_{isa}.dir/**/*.o")
    ]
    if not objects:
        pytest.skip("the build folder with the objects of _C.so is gone: build again, in place")
    for path in objects:
        isa = path.parts[path.parts.index("CMakeFiles") + 1].removeprefix("lighttransfer_cpu_").removesuffix(".dir")
        for line in subprocess.check_output(["nm", "-C", "--defined-only", path], text=True).splitlines():
            kind, name = line.split(maxsplit=2)[1:]
            local = kind.islower() and kind not in "vwu"
            assert local or f"lighttransfer::cpu::{isa}::" in name, f"{path.name} for {isa} shares {kind} {name}"
