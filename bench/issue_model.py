"""How much of an A100's tensor rate a kernel's steady loop can reach: its SASS, run through a model of one SM's issue.

    python bench/issue_model.py OBJECT... [--function TEXT] [--ctas 2] [--warps 4] [--cuobjdump PATH]

Every warp of the SM walks through the loop. A warp issues its next instruction when its stall count has passed, the
barriers that it waits for are free and its unit takes another one; each of the four schedulers issues one instruction
a clock. CTA barriers hold a CTA's warps, asynchronous copies hold who waits for them. Whose turn it is where several
warps could issue is not documented, and decides whether the CTAs take turns with the tensor cores or get in each
other's way: the command prints the share for three orders, and where they disagree the model does not know.

What it leaves out: instruction fetch, register bank conflicts, bank conflicts of shared memory (these kernels have
none), the L2's bandwidth, and the power limit.
"""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from sass import Instruction, disassemble, find_cuobjdump, steady_loop

SCHEDULERS = 4
#: Which of the warps that could issue does. "greedy", the same warp as before and else the youngest, is what Huerta et
#: al. found on Ampere ("Analyzing modern NVIDIA GPU cores", arXiv:2503.20481).
ORDERS = ("longest waiting", "first CTA", "greedy")

# Clocks that a warp instruction keeps its unit busy: the units of a sub-partition, by what they execute.
TENSOR, SPECIAL, FP32, INTEGER, SHARED = "tensor", "special", "fp32", "integer", "shared"
OCCUPIED = {TENSOR: 8, SPECIAL: 8, FP32: 2, INTEGER: 2}
UNITS = {
    TENSOR: ("HMMA",),
    SPECIAL: ("MUFU", "F2FP", "I2F", "F2I", "POPC"),  # conversions: 16 a clock and SM, documented for sm_70
    FP32: ("FFMA", "FADD", "FMUL", "IMAD"),
    INTEGER: ("FMNMX", "FSETP", "FSEL", "IADD3", "LOP3", "LEA", "SHF", "SEL", "ISETP", "PRMT", "MOV", "PLOP3"),
    SHARED: ("LDSM", "LDS", "STS", "SHFL", "LDGSTS"),
}
UNIT_OF = {opcode: unit for unit, opcodes in UNITS.items() for opcode in opcodes}
# Shared memory serves the whole SM, 128 B a clock; each sub-partition has a queue before it.
QUEUE = 8
# From start to result: shared memory and ldmatrix as measured by Sun et al., "Dissecting tensor cores via
# microbenchmarks" (arXiv:2206.02874), the others of that order. A copy comes from the L2.
LATENCY = {"LDSM": 29, "LDS": 23, "STS": 23, "SHFL": 23, "MUFU": 20}
COPY_LATENCY = 400
BARRIER_LATENCY = 20


def wavefronts(instruction: Instruction) -> int:
    """Clocks of shared memory."""
    if instruction.text.startswith("@!PT"):
        return 0
    matrices = re.search(r"\.M88\.(\d)", instruction.full_opcode)
    bits = re.search(r"\.(64|128)\b", instruction.full_opcode)
    return int(matrices[1]) if matrices else int(bits[1]) // 32 if bits else 1


@dataclass
class Operation:
    """What the model needs of an instruction."""

    kind: str
    unit: str | None
    stall: int
    clocks: int
    latency: int
    write_barrier: int
    read_barrier: int
    waits: tuple[int, ...]
    pending: int  # DEPBAR.LE: copy groups that may be under way

    @classmethod
    def of(cls, instruction: Instruction) -> Operation:
        unit = UNIT_OF.get(instruction.opcode)
        pending = re.search(r"DEPBAR\.LE SB\d, (0x[0-9a-f]+)", instruction.text)
        return cls(
            kind=instruction.opcode,
            unit=unit,
            stall=max(1, instruction.stall),
            clocks=wavefronts(instruction) if unit == SHARED else OCCUPIED.get(unit or "", 0),
            latency=LATENCY.get(instruction.opcode, 20),
            write_barrier=instruction.write_barrier,
            read_barrier=instruction.read_barrier,
            waits=tuple(b for b in range(6) if instruction.wait >> b & 1),
            pending=int(pending[1], 16) if pending else 0,
        )


@dataclass
class Warp:
    scheduler: int
    cta: int
    ready: float
    at: int = 0  # in the loop
    issued: float = -1.0
    free: list[float] = field(default_factory=lambda: [0.0] * 6)  # when each barrier is
    copies: float = 0.0  # when those since the last group are there
    groups: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)  # the end of each trip


class Sm:
    """One SM with some CTAs of the kernel, all in its loop; the CTAs start ``offset`` clocks apart."""

    def __init__(self, loop: list[Instruction], ctas: int, warps_per_cta: int, offset: float = 0.0) -> None:
        self.loop = [Operation.of(instruction) for instruction in loop]
        self.warps = [Warp(w % SCHEDULERS, c, c * offset) for c in range(ctas) for w in range(warps_per_cta)]
        self.slot = [0.0] * SCHEDULERS
        self.unit_free = [dict.fromkeys(OCCUPIED, 0.0) for _ in range(SCHEDULERS)]
        self.shared_free = 0.0
        self.now = 0.0
        self.queued = [deque[float]() for _ in range(SCHEDULERS)]  # when each entry leaves the queue
        self.arrived: dict[int, list[Warp]] = {c: [] for c in range(ctas)}
        self.warps_per_cta = warps_per_cta
        self.tensor_issues: list[float] = []
        self.trips = 0  # of all warps

    def earliest(self, warp: Warp) -> float:
        """When the warp could issue its next instruction."""
        operation = self.loop[warp.at]
        time = max(warp.ready, self.slot[warp.scheduler], *(warp.free[b] for b in operation.waits), 0.0)
        if operation.unit in OCCUPIED:
            return max(time, self.unit_free[warp.scheduler][operation.unit])
        queue = self.queued[warp.scheduler]
        if operation.unit == SHARED and len(queue) >= QUEUE:
            return max(time, queue[-QUEUE])
        return time

    def issue(self, warp: Warp, now: float) -> None:
        operation = self.loop[warp.at]
        self.slot[warp.scheduler] = now + 1
        warp.issued, warp.ready = now, now + operation.stall
        start = now
        if operation.unit in OCCUPIED:
            self.unit_free[warp.scheduler][operation.unit] = now + operation.clocks
            if operation.unit == TENSOR:
                self.tensor_issues.append(now)
        elif operation.unit == SHARED:
            start = max(now, self.shared_free)
            self.shared_free = start + operation.clocks
            self.queued[warp.scheduler].append(start)
            while self.queued[warp.scheduler][0] <= now - 1000:
                self.queued[warp.scheduler].popleft()
        if operation.write_barrier < 6:
            warp.free[operation.write_barrier] = max(warp.free[operation.write_barrier], start + operation.latency)
        if operation.read_barrier < 6:
            warp.free[operation.read_barrier] = max(warp.free[operation.read_barrier], start + 2)
        self._synchronise(warp, operation, start)
        warp.at += 1
        if warp.at == len(self.loop):
            warp.at = 0
            warp.finished.append(now)
            self.trips += 1

    def _synchronise(self, warp: Warp, operation: Operation, start: float) -> None:
        if operation.kind == "LDGSTS":
            warp.copies = start + COPY_LATENCY
        elif operation.kind == "LDGDEPBAR":
            warp.groups.append(warp.copies)
        elif operation.kind == "DEPBAR":
            complete = warp.groups[: len(warp.groups) - operation.pending]
            warp.ready = max(warp.ready, *complete[-1:], 0.0)
        elif operation.kind == "BAR":
            waiting = self.arrived[warp.cta]
            waiting.append(warp)
            if len(waiting) < self.warps_per_cta:
                warp.ready = inf
                return
            for other in waiting:
                other.ready = max(warp.issued + BARRIER_LATENCY, other.issued + operation.stall)
            waiting.clear()

    def run(self, trips: int, order: str) -> None:
        """Until the warps have made that many trips each, on the average."""
        last = [-1] * SCHEDULERS
        turn: dict[str, Callable[[Warp, int], float]] = {
            "longest waiting": lambda warp, i: warp.issued,
            "first CTA": lambda warp, i: i,
            "greedy": lambda warp, i: -inf if last[warp.scheduler] == i else -i,
        }
        times = [self.earliest(warp) for warp in self.warps]
        while self.trips < trips * len(self.warps):
            self.now, _, i = min(
                (time, turn[order](w, i), i) for i, (time, w) in enumerate(zip(times, self.warps, strict=True))
            )
            barrier = self.loop[self.warps[i].at].kind == "BAR"
            scheduler = self.warps[i].scheduler
            self.issue(self.warps[i], self.now)
            last[scheduler] = i
            for other, warp in enumerate(self.warps):
                if barrier or warp.scheduler == scheduler:
                    times[other] = self.earliest(warp)


def tensor_share(
    loop: list[Instruction], ctas: int, warps_per_cta: int, order: str = ORDERS[0], trips: int = 8, offsets: int = 8
) -> float:
    """The share of its time that the SM's tensor units are busy in the loop, over several offsets of the CTAs."""
    per_trip = sum(x.opcode == "HMMA" for x in loop) * OCCUPIED[TENSOR] * ctas * warps_per_cta / SCHEDULERS
    shares = []
    for step in range(offsets if ctas > 1 else 1):
        sm = Sm(loop, ctas, warps_per_cta, offset=step * per_trip / offsets)
        sm.run(3, order)
        begin, before = sm.now, len(sm.tensor_issues)
        sm.run(trips, order)
        busy = (len(sm.tensor_issues) - before) * OCCUPIED[TENSOR] / SCHEDULERS
        shares.append(busy / (sm.now - begin))
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", type=Path, nargs="+")
    parser.add_argument("--function", default="", help="a part of the mangled name of the functions to look at")
    parser.add_argument("--ctas", type=int, default=2, help="of an SM")
    parser.add_argument("--warps", type=int, default=4, help="of a CTA")
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    options = parser.parse_args()
    if options.cuobjdump is None:
        parser.error("no cuobjdump in PATH: pass --cuobjdump")
    print("".join(f"{head:>18}" for head in ("SASS per HMMA", *ORDERS)))
    for path in options.objects:
        for name, listing in disassemble(options.cuobjdump, path).items():
            if options.function not in name or not any(x.opcode == "HMMA" for x in listing):
                continue
            loop = steady_loop(listing)
            shares = [tensor_share(loop, options.ctas, options.warps, order) for order in ORDERS]
            per_hmma = len(loop) / sum(x.opcode == "HMMA" for x in loop)
            print(f"{per_hmma:18.2f}", *(f"{share:17.1%}" for share in shares), f" {path.name} {name}")


if __name__ == "__main__":
    main()
