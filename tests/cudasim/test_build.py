"""For which instruction set the simulator is built: its folder may move to another machine."""

from __future__ import annotations

import pytest

from cudasim._build import X86_64_V3, instruction_set


def cpuinfo(flags: set[str] | frozenset[str]) -> str:
    core = f"model name\t: some CPU\nflags\t\t: fpu sse4_2 {' '.join(sorted(flags))} avx512f\nbugs\t\t: fma\n"
    return core + "\n" + core


def test_a_cpu_with_avx2_and_fma_gets_them_and_no_more() -> None:
    assert instruction_set("x86_64", cpuinfo(X86_64_V3)) == "x86-64-v3"


@pytest.mark.parametrize("missing", sorted(X86_64_V3))
def test_a_cpu_without_one_of_them_gets_the_compilers_default(missing: str) -> None:
    assert instruction_set("x86_64", cpuinfo(X86_64_V3 - {missing})) == ""


def test_other_machines_get_the_compilers_default() -> None:
    assert instruction_set("aarch64", "Features\t: fp asimd\n") == ""
    assert instruction_set("x86_64", "") == ""
