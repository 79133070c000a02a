"""Random and extreme values of every PTX type, and integers of Python that wrap like PTX's."""

from __future__ import annotations

import numpy as np

from cudasim.ptx_builder import dtype

N = 1024


def values(ptx_type: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    t = np.dtype(dtype(ptx_type))
    if t.kind == "f":
        x = (rng.standard_normal(N) * 10.0 ** rng.integers(-12, 12, N)).astype(t)
        tiny = np.finfo(t).tiny
        special = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1.5,
            2.5,
            -2.5,
            np.inf,
            -np.inf,
            np.nan,
            tiny,
            tiny / 4,
            -tiny / 8,
            np.finfo(t).max,
        ]
    else:
        x = rng.integers(0, 2 ** (8 * t.itemsize), N, dtype=np.uint64).astype(t)
        info = np.iinfo(t)
        special = [0, 1, 2, 3, 31, 32, 33, 63, info.max, info.min, info.max - 1, info.min + 1]
    special = np.array(special, dtype=t)
    x[: 4 * len(special)] = np.tile(special, 4)
    return rng.permutation(x)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(object)


def wrap(x: np.ndarray, ptx_type: str) -> np.ndarray:
    t = np.dtype(dtype(ptx_type))
    bits = 8 * t.itemsize
    mask = (1 << bits) - 1
    unsigned = np.array([int(v) & mask for v in x], dtype=f"u{t.itemsize}")
    return unsigned.view(t)
