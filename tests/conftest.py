"""Fixtures that every op test shares."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lighttransfer import _library

#: Run the op tests on the simulated CUDA kernels too: "on" builds them (target _sim of build/cmake), a path names a
#: built _sim.so, "off" leaves them out.
SIMULATOR = os.environ.get("LIGHTTRANSFER_CUDASIM", "off")


@functools.cache
def _simulator() -> ModuleType:
    import cudasim

    cudasim.load_ops(library=None if SIMULATOR == "on" else Path(SIMULATOR))
    return cudasim


def _backends() -> list[str]:
    backends = ["cpu"]
    if SIMULATOR != "off":
        backends.append("cudasim")
    if torch.cuda.is_available():
        backends.append("cuda")
    return backends


@pytest.fixture(params=_backends())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of an op test's tensors; ops called through lighttransfer.ops run on that backend."""
    if request.param == "cudasim":
        monkeypatch.setattr(_library, "namespace", "lighttransfer_sim")
        with _simulator().record() as log:
            yield "cpu"
        assert not log.findings, "\n".join(map(repr, log.findings[:5]))
    else:
        yield request.param
