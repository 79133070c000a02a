"""The ops over the PTX simulator: ``torch.ops.lighttransfer_sim.*`` runs the CUDA kernels on CPU tensors.

``python tests/simulator.py`` builds it, so that a test run does not start with a compile.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

from lighttransfer import _library


def build_folder() -> Path:
    """Where the CUDA objects lie: beside the library under test, or where setup.py builds."""
    library = os.environ.get("LIGHTTRANSFER_LIBRARY")
    return Path(library).resolve().parent if library else Path(__file__).parent.parent / "build" / "cmake"


def missing() -> str | None:
    """What the simulator cannot run without, or None."""
    cache = build_folder() / "CMakeCache.txt"
    if not cache.exists() or not re.search(r"^NVCC:\w+=.+$", cache.read_text(), re.MULTILINE):
        return "the library under test was built without CUDA objects: build it with LIGHTTRANSFER_CUDA=on"
    return None


@lru_cache(maxsize=1)
def load() -> Path:
    """Builds the ops on the simulator, quick where nothing has changed, and loads them."""
    import cudasim

    _library.load()
    return cudasim.load_ops(build_folder())


if __name__ == "__main__":
    print(missing() or f"built {load().name}")
