"""Each barrier, cp.async wait and commit of the kernels is needed: without it, a finding or a wrong value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import simulator
import torch

from lighttransfer import _library
from lighttransfer.ops import lazy_ratio, prefill_attn, prefill_attn_lazy, retained_mass, streaming_decode

BF16 = torch.bfloat16
Case = Callable[[], tuple[torch.Tensor, ...]]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _prefill(head_dim: int, n_queries: int, n_keys: int) -> tuple[torch.Tensor, ...]:
    """Two query heads over one KV head; causal, S_q != S_k."""
    q, k, v = (
        _random(1, n, heads, head_dim, seed=heads + n) for n, heads in ((n_queries, 2), (n_keys, 1), (n_keys, 1))
    )
    return prefill_attn(q, k, v)


def _lazy(head_dim: int) -> tuple[torch.Tensor, ...]:
    q, k, v = (_random(1, 200, heads, head_dim, seed=heads) for heads in (2, 1, 1))
    return prefill_attn_lazy(q, k, v, n_sink=4, n_recent=60, n_last=32)


def _leap(head_dim: int) -> tuple[torch.Tensor, ...]:
    """Scores that leap beyond every weight at the left end: their rows are done again, from a tile without masks on."""
    q, k, v = (_random(1, n, heads, head_dim, seed=heads) for n, heads in ((130, 2), (640, 1), (640, 1)))
    q[..., 0], k[..., 0] = 1, 0
    k[:, 100:140, :, 0] = 80 * head_dim**0.5
    return prefill_attn(q, k, v, causal=False)


def _unaligned(head_dim: int) -> tuple[torch.Tensor, ...]:
    """Rows that start off 16 bytes: copies without cp.async."""
    q, k, v = (_random(1, 200, heads, head_dim + 1, seed=heads)[..., 1:] for heads in (2, 1, 1))
    return prefill_attn(q, k, v)


def _decode(head_dim: int, n_heads: int, n_keys: int, mass_n_recent: int = -1) -> tuple[torch.Tensor, ...]:
    """One full row of n_keys, the new one included; from 8,193 keys on a split has several tiles."""
    k_cache, v_cache = _random(1, n_keys, 1, head_dim, seed=1), _random(1, n_keys, 1, head_dim, seed=2)
    q, k, v = (_random(1, 1, heads, head_dim, seed=heads) for heads in (n_heads, 1, 1))
    return streaming_decode(
        q, k, v, k_cache, v_cache, _int32(n_keys - 1), n_sink=4, n_recent=_int32(0), mass_n_recent=mass_n_recent
    )


def _mass(head_dim: int) -> tuple[torch.Tensor, ...]:
    q, k = _random(1, 20, 4, head_dim, seed=1), _random(1, 400, 1, head_dim, seed=2)
    return (retained_mass(q, k, torch.full((1, 4, 20), 7.0), n_sink=4, n_recent=250),)


def _ratio() -> tuple[torch.Tensor, ...]:
    return (lazy_ratio(torch.rand(1, 40, 32, 2, generator=torch.Generator().manual_seed(0))),)


#: A mutant: its instruction, and its number among the equal ones of the kernel.
Place = tuple[str, int]


@dataclass(frozen=True)
class Subject:
    """A kernel, by a part of its mangled name, with calls that together execute all its mutants."""

    kernel: str
    cases: tuple[Case, ...]
    equivalent: dict[Place, str] = field(default_factory=dict)  # why nothing changes


def _prefill_subject(head_dim: int) -> Subject:
    cases: tuple[Case, ...] = (
        lambda: _prefill(head_dim, 130, 330),
        lambda: _prefill(head_dim, 330, 130),  # query tiles without keys
        lambda: _lazy(head_dim),
        lambda: _leap(head_dim),
        lambda: _unaligned(head_dim),
    )
    equivalent = {}
    if head_dim == 128:
        equivalent = {("bar.warp.sync -1;", 0): "tells the compiler how to order instructions, the warp nothing"}
    return Subject(f"prefill_attn_kernelI13__nv_bfloat16NS0_12PrefillShapeILi{head_dim}E", cases, equivalent)


def _decode_subject(head_dim: int, n_heads: int = 4) -> Subject:
    cases: tuple[Case, ...] = (
        lambda: _decode(head_dim, n_heads, 300),
        lambda: _decode(head_dim, n_heads, 8_300, mass_n_recent=60),  # two tiles a split
        lambda: _decode(head_dim, n_heads, 16_500),  # four: a stage is filled again
    )
    kernel = f"decode_split_kernelI13__nv_bfloat16NS0_11DecodeShapeILi{head_dim}ELi{1 if n_heads <= 8 else 2}E"
    return Subject(kernel, cases)


def _mass_subject(head_dim: int) -> Subject:
    return Subject(f"retained_mass_kernelI13__nv_bfloat16Li{head_dim}E", (lambda: _mass(head_dim),))


MAKERS = (_prefill_subject, _decode_subject, _mass_subject)
SUBJECTS = [make(head_dim) for head_dim in (64, 128) for make in MAKERS] + [Subject("lazy_ratio_kernel", (_ratio,))]
MORE_SUBJECTS = [make(head_dim) for head_dim in (96, 256) for make in MAKERS] + [
    _decode_subject(head_dim, 16) for head_dim in (64, 96, 128, 256)
]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops on the simulator; unlike the device fixture's, findings are what these tests wait for."""
    if os.environ.get("LIGHTTRANSFER_CUDASIM") == "off":
        pytest.skip("LIGHTTRANSFER_CUDASIM=off")
    if reason := simulator.missing():
        pytest.skip(reason)
    simulator.load()
    monkeypatch.setattr(_library, "namespace", "lighttransfer_sim")


@dataclass(frozen=True)
class Run:
    """A call of the kernel as it is: its values, and how often each PTX line was executed."""

    case: Case
    values: tuple[torch.Tensor, ...]
    executed: dict[int, int]


def _run(kernel: str, case: Case) -> Run:
    import cudasim

    with cudasim.record() as log:
        values = case()
    assert not log.findings
    assert not any(value.isnan().any() for value in values)
    reports = [report for report in log.reports if report.kernel == kernel]
    assert reports, f"the call did not launch {kernel}"
    executed: dict[int, int] = {}
    for line in (line for report in reports for line in report.lines()):
        executed[line["ptx_line"]] = executed.get(line["ptx_line"], 0) + line["executed"]
    return Run(case, values, executed)


def _is_caught(kernel: str, mutant, run: Run) -> bool:
    """By a finding, which also fails the launch, or by other values: the kernels give the same bits in every run."""
    import cudasim

    with cudasim.apply_mutant(kernel, mutant), cudasim.record() as log:
        try:
            values = run.case()
        except RuntimeError:
            assert any(report.findings for report in cudasim.reports()), "the op failed for another reason"
            return True
    return bool(log.findings) or not all(map(torch.equal, values, run.values))


def _places(mutants) -> Iterator[tuple[Place, object]]:
    counts: dict[str, int] = {}
    for mutant in mutants:
        counts[mutant.ptx] = counts.get(mutant.ptx, -1) + 1
        yield (mutant.ptx, counts[mutant.ptx]), mutant


def _check(subject: Subject) -> None:
    import cudasim

    kernel = cudasim.kernel(subject.kernel).name
    runs = [_run(kernel, case) for case in subject.cases]
    survivors, unreached = set(), set()
    mutants = cudasim.mutants(kernel)
    assert mutants
    for place, mutant in _places(mutants):
        reaching = [run for run in runs if run.executed.get(mutant.ptx_line)]
        if not reaching:
            unreached.add(place)
        elif not any(_is_caught(kernel, mutant, run) for run in reaching):
            survivors.add(place)
    # Both ways: what is listed and caught after all is no longer an exception.
    assert survivors == set(subject.equivalent)
    assert not unreached


def _name(subject: Subject) -> str:
    return (
        subject.kernel.replace("_kernelI13__nv_bfloat16", "-")
        .replace("NS0_12PrefillShapeI", "")
        .replace("NS0_11DecodeShapeI", "")
    )


@pytest.mark.parametrize("subject", SUBJECTS, ids=_name)
def test_every_mutant_is_caught(simulated: None, subject: Subject) -> None:
    _check(subject)


@pytest.mark.slow
@pytest.mark.parametrize("subject", MORE_SUBJECTS, ids=_name)
def test_every_mutant_of_more_shapes_is_caught(simulated: None, subject: Subject) -> None:
    _check(subject)
