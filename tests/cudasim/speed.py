"""How fast the simulator runs: ``python -m cudasim.speed`` executes a CUTLASS GEMM."""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import cutlass_library
import numpy as np

import cudasim


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cudasim.speed", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    include = Path(cutlass_library.__file__).parent / "source" / "include"
    source = Path(__file__).parent / "kernels" / "gemm.cu"
    library = cudasim.load_library(cudasim.compile_library(source, include=[include]))
    m = n = k = 256
    a, b, c = np.zeros((m, k), np.uint16), np.zeros((n, k), np.uint16), np.zeros((m, n), np.float32)

    def launch() -> int:
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (a, b, c)]
        with cudasim.record() as log:
            library.gemm(m, n, k, *pointers, ctypes.c_float(1), ctypes.c_float(0))
        assert not log.findings
        return int(log.report.total_instructions)

    for checks in (True, False):
        with cudasim.buffer(a, b, c), cudasim.option(threads=1, race_check=checks):
            launch()  # parses the kernel
            start = time.process_time()
            total = sum(launch() for _ in range(options.repeats))
            rate = total / (time.process_time() - start) / 1e6
        print(
            f"{rate:.1f} million warp instructions per second of processor time, race check {'on' if checks else 'off'}"
        )


if __name__ == "__main__":
    main()
