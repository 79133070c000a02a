"""Fixtures that every op test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import simulator
import torch

from lighttransfer import _library


def _backends() -> list[str]:
    """LIGHTTRANSFER_CUDASIM=off leaves the simulator out, for a quick look at the CPU."""
    backends = ["cpu"]
    if os.environ.get("LIGHTTRANSFER_CUDASIM", "on") != "off":
        backends.append("cudasim")
    if torch.cuda.is_available():
        backends.append("cuda")
    return backends


def _parameters(request: pytest.FixtureRequest) -> dict[str, object]:
    return request.node.callspec.params


@pytest.fixture(params=_backends())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of an op test's tensors; ops called through lighttransfer.ops run on that backend.

    On ``cudasim`` tensors lie on the CPU and the CUDA kernels run in the simulator, where a finding (a race, an access
    out of bounds, a missing barrier, ...) fails the test.
    """
    if request.param != "cpu" and _parameters(request).get("dtype") == torch.float32:
        pytest.skip("fp32 is a CPU dtype")
    if request.param != "cudasim":
        yield request.param
        return
    if reason := simulator.missing():
        pytest.skip(reason)
    import cudasim

    simulator.load()
    monkeypatch.setattr(_library, "namespace", "lighttransfer_sim")
    with cudasim.record() as log:
        yield "cpu"
    assert not log.findings, "\n".join(str(finding) for finding in log.findings[:5])
