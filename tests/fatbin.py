"""What a library's fat binaries hold: ``python tests/fatbin.py LIBRARY`` checks it and lists the kernels.

Reads the section .nv_fatbin by itself, so that nothing of CUDA is needed; tests/cudasim has the same format in C++.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
COMPRESSED = 0x2000 | 0x8000  # LZ4, zstd
SYMBOL_TABLE, FUNCTION = 2, 2  # ELF's SHT_SYMTAB and STT_FUNC
CUDA_ENTRY = 0x10  # st_other of a symbol that a launch can name


@dataclass
class Kernels:
    """Names of kernels by compute capability, e.g. ``sass[80]``."""

    sass: dict[int, set[str]] = field(default_factory=dict)
    ptx: dict[int, set[str]] = field(default_factory=dict)

    def problems(self, arch: int = 80) -> list[str]:
        """What keeps a library from running every kernel on ``arch`` and, by its PTX, on later GPUs."""
        sass, ptx = self.sass.get(arch, set()), self.ptx.get(arch, set())
        found = [f"no sm_{arch} SASS for {name}" for name in sorted(ptx - sass)]
        found += [f"no compute_{arch} PTX for {name}" for name in sorted(sass - ptx)]
        return found if sass and ptx else [*found, f"no kernel for compute capability {arch}"]


def _sections(elf: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, section header) of an ELF64 file; a header is name, type, flags, address, offset, size, link, ..."""
    table, size, count, names = struct.unpack_from("<Q", elf, 40) + struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    for header in headers:
        yield _string(elf, headers[names][4] + header[0]), header


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _cubin_kernels(elf: bytes) -> set[str]:
    """The entry functions that have code."""
    sections = [header for _, header in _sections(elf)]
    found = set()
    for table in (header for header in sections if header[1] == SYMBOL_TABLE):
        for at in range(table[4], table[4] + table[5], 24):
            name, info, other, section, _, n_bytes = struct.unpack_from("<IBBHQQ", elf, at)
            if info & 15 == FUNCTION and other & CUDA_ENTRY and section and n_bytes:
                found.add(_string(elf, sections[table[6]][4] + name))
    return found


def _entries(section: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(kind, compute capability, payload) of every entry; a linked library has a container for each object."""
    start = 0
    while start + 16 <= len(section):
        magic, _, header, size = struct.unpack_from("<IHHQ", section, start)
        if magic != FATBIN_MAGIC:
            start += 8  # padding between containers
            continue
        at, end = start + header, start + header + size
        while at < end:
            kind, _, entry_header, n_bytes = struct.unpack_from("<HHIQ", section, at)
            (arch,), (flags,) = struct.unpack_from("<I", section, at + 28), struct.unpack_from("<Q", section, at + 40)
            if flags & COMPRESSED:
                raise ValueError("fat binary is compressed: compile with nvcc -no-compress")
            yield kind, arch, section[at + entry_header : at + entry_header + n_bytes]
            at += entry_header + n_bytes
        start = end + -end % 8


def read(library: Path) -> Kernels | None:
    """The kernels of a library, or None for one that was built without CUDA objects."""
    elf = library.read_bytes()
    fatbins = [header for name, header in _sections(elf) if name == ".nv_fatbin"]
    if not fatbins:
        return None
    kernels = Kernels()
    for header in fatbins:
        for kind, arch, payload in _entries(elf[header[4] : header[4] + header[5]]):
            if kind == CUBIN:
                kernels.sass.setdefault(arch, set()).update(_cubin_kernels(payload))
            elif kind == PTX:
                names = re.findall(rb"^\s*(?:\.visible\s+|\.weak\s+)*\.entry\s+([\w$]+)", payload, re.MULTILINE)
                kernels.ptx.setdefault(arch, set()).update(name.decode() for name in names)
    return kernels


def main() -> int:
    kernels = read(Path(sys.argv[1]))
    if kernels is None:
        print("no CUDA objects")
        return 1
    problems = kernels.problems()
    print("\n".join(problems or sorted(kernels.sass[80])))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
