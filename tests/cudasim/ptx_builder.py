"""Builds one-instruction PTX kernels for the simulator's own tests, and runs them over arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import cudasim

#: numpy dtype, register type and load/store type of a PTX type; 16-bit floats travel as bits.
_TYPES = {
    "u16": (np.uint16, "b16", "u16"),
    "s16": (np.int16, "b16", "u16"),
    "b16": (np.uint16, "b16", "u16"),
    "f16": (np.uint16, "b16", "u16"),
    "bf16": (np.uint16, "b16", "u16"),
    "u32": (np.uint32, "b32", "u32"),
    "s32": (np.int32, "b32", "u32"),
    "b32": (np.uint32, "b32", "u32"),
    "f32": (np.float32, "f32", "f32"),
    "u64": (np.uint64, "b64", "u64"),
    "s64": (np.int64, "b64", "u64"),
    "b64": (np.uint64, "b64", "u64"),
    "f64": (np.float64, "f64", "f64"),
    "u8": (np.uint8, "b16", "u8"),
}

_counter = itertools.count()


@dataclass
class Spec:
    """``body`` uses %d0, %d1, ... as results, %s0, %s1, ... as sources, and may declare more registers."""

    body: str
    results: Sequence[str]
    sources: Sequence[str]


def dtype(ptx_type: str) -> type:
    return _TYPES[ptx_type][0]


def kernel_text(name: str, spec: Spec) -> str:
    """A kernel of n threads a block: element i of every array belongs to thread i of the grid."""
    types = [*spec.results, *spec.sources]
    names = [f"%d{i}" for i in range(len(spec.results))] + [f"%s{i}" for i in range(len(spec.sources))]
    params = ", ".join(f".param .u64 p{i}" for i in range(len(types)))
    lines = [f".visible .entry {name}({params})", "{", ".reg .b32 %i<4>;", ".reg .b64 %a<3>;"]
    lines += [f".reg .{_TYPES[t][1]} {n};" for t, n in zip(types, names, strict=True)]
    lines += [
        "mov.u32 %i0, %ctaid.x;",
        "mov.u32 %i1, %ntid.x;",
        "mov.u32 %i2, %tid.x;",
        "mad.lo.u32 %i3, %i0, %i1, %i2;",
    ]

    def address(i: int) -> list[str]:
        size = np.dtype(_TYPES[types[i]][0]).itemsize
        return [f"ld.param.u64 %a0, [p{i}];", f"mul.wide.u32 %a1, %i3, {size};", "add.u64 %a2, %a0, %a1;"]

    for i in range(len(spec.results), len(types)):
        lines += [*address(i), f"ld.global.{_TYPES[types[i]][2]} {names[i]}, [%a2];"]
    lines += ["{", spec.body, "}"]
    for i in range(len(spec.results)):
        lines += [*address(i), f"st.global.{_TYPES[types[i]][2]} [%a2], {names[i]};"]
    return "\n".join([*lines, "ret;", "}"])


def run(spec: Spec, *sources: np.ndarray, threads: int = 32) -> list[np.ndarray]:
    """Runs the instruction over the sources, whose length must be a multiple of ``threads``."""
    name = f"instruction_{next(_counter)}"
    cudasim.load_ptx(f".version 9.0\n.target sm_80\n.address_size 64\n{kernel_text(name, spec)}\n")
    n = len(sources[0])
    inputs = [np.ascontiguousarray(s, dtype=dtype(t)) for s, t in zip(sources, spec.sources, strict=True)]
    results = [np.zeros(n, dtype=dtype(t)) for t in spec.results]
    report = cudasim.kernel(name).launch(n // threads, threads, *results, *inputs)
    assert not report.findings, report.findings
    return results
