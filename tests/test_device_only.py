"""The mode that stands in for a CUDA graph's capture sees what a capture forbids, in this package's code alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device_only import Forbidden, no_host

import lighttransfer

FORBIDDEN = {
    "item": "x.sum().item()",
    "bool": "bool((x > 0).all())",
    "tolist": "x.tolist()",
    "numpy": "x.numpy()",
    "nonzero": "x.nonzero()",
    "tensor": "torch.tensor([1, 2])",
    "zeros": "torch.zeros(2)",
    "sum": "x + 1",
    "cat": "torch.cat([x, x])",
    "index": "x[torch.tensor([0])]",
    "copy": "x.copy_(y)",
    "contiguous": "x[:, None].expand(2, 2).contiguous()",
}
ALLOWED = ["x.add_(1)", "x[None]", "x.view(1, 2)", "x.index_copy_(0, at, y[:1])"]


def as_ours(expression: str) -> Callable[..., object]:
    """A function of ``x, y, at`` that seems to stand in the package."""
    code = f"import torch\ndef f(x, y, at):\n    return {expression}\n"
    namespace: dict[str, Callable[..., object]] = {}
    exec(compile(code, str(Path(lighttransfer.__file__).parent / "cache" / "layer.py"), "exec"), namespace)
    return namespace["f"]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_mode_sees(name: str) -> None:
    with pytest.raises(Forbidden), no_host():
        as_ours(FORBIDDEN[name])(torch.ones(2), torch.ones(2), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("expression", ALLOWED)
def test_the_mode_allows(expression: str) -> None:
    function, x, y, at = as_ours(expression), torch.ones(2), torch.ones(2), torch.zeros(1, dtype=torch.int64)
    with no_host():
        function(x, y, at)
        torch.cat([x, x])  # not ours
