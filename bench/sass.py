"""Reads a kernel's SASS: instructions with their control codes, and the steady loop among them.

The disassembler is in CUDA's toolkit and in the PyPI packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

#: A forward branch over at least this many instructions without tensor work or copies leaves out a rare path.
RARE_PATH = 60


@dataclass(frozen=True)
class Instruction:
    """An instruction of sm_70 and later; ``control`` is bits 105 to 125 of its 128.

    The compiler schedules statically: ``stall`` clocks pass before the warp's next instruction. Where a latency is not
    fixed one of six barriers takes its place: the result sets ``write_barrier`` (7: none), the operands' release
    ``read_barrier``, and an instruction whose ``wait`` has the barrier's bit is held until then.
    """

    address: int
    text: str
    control: int = 0x7E1  # stall 1, no barriers

    @cached_property
    def opcode(self) -> str:
        return self.full_opcode.split(".")[0]

    @cached_property
    def full_opcode(self) -> str:
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @cached_property
    def target(self) -> int | None:
        match = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", self.text)
        return int(match[1], 16) if match else None

    @property
    def stall(self) -> int:
        return self.control & 15

    @property
    def write_barrier(self) -> int:
        return self.control >> 5 & 7

    @property
    def read_barrier(self) -> int:
        return self.control >> 8 & 7

    @property
    def wait(self) -> int:
        return self.control >> 11 & 63


def find_cuobjdump() -> str | None:
    """On the PATH, or where PyPI's package puts it."""
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "cuobjdump"
    return shutil.which("cuobjdump") or (str(packaged) if packaged.is_file() else None)


def disassemble(cuobjdump: str, path: Path) -> dict[str, list[Instruction]]:
    """The functions of an object, by mangled name."""
    command = [cuobjdump, "-sass", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pattern = re.compile(
        r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/\s+/\* (0x[0-9a-f]{16}) \*/", re.M
    )
    return {
        name: [
            Instruction(int(address, 16), instruction, int(high, 16) >> 41 & 0x1FFFFF)
            for address, instruction, high in pattern.findall(body)
        ]
        for name, body in re.findall(r"Function : (\S+)\n(.*?)(?=\n\s*Function : |\Z)", text, re.S)
    }


def executed(listing: list[Instruction], first: int, last: int) -> Iterator[Instruction]:
    """One trip through a loop, rare paths left out."""
    index = {instruction.address: i for i, instruction in enumerate(listing)}
    i = first
    while i <= last:
        yield listing[i]
        jump = index.get(listing[i].target or -1, -1)
        skipped = [x.opcode for x in listing[i + 1 : max(i + 1, jump)]]
        rare = len(skipped) >= RARE_PATH and not {"HMMA", "LDGSTS"} & set(skipped)
        i = jump if i < jump <= last and rare else i + 1


def steady_loop(listing: list[Instruction]) -> list[Instruction]:
    """A trip through the loop over unmasked tiles: of all loops without a mask's selects the one with most HMMA."""
    index = {instruction.address: i for i, instruction in enumerate(listing)}
    loops: list[list[Instruction]] = []
    for last, instruction in enumerate(listing):
        first = index.get(instruction.target or -1, last + 1)
        if first <= last:
            body = Counter(x.opcode for x in listing[first : last + 1])
            if body["HMMA"] and body["FSEL"] < body["HMMA"] // 8:
                loops.append(list(executed(listing, first, last)))
    return max(loops, key=lambda trip: sum(x.opcode == "HMMA" for x in trip))
