"""Fixtures that every op test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lighttransfer import _library


def _backends() -> list[str]:
    backends = ["cpu"]
    if torch.cuda.is_available():
        backends.append("cuda")
    return backends


@pytest.fixture(params=_backends())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of an op test's tensors; ops called through lighttransfer.ops run on that backend."""
    if request.param == "cudasim":
        monkeypatch.setattr(_library, "namespace", "lighttransfer_sim")
        yield "cpu"
    else:
        yield request.param
