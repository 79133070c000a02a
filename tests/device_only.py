"""What a decode step may do where it is captured in a CUDA graph, checked and imitated on the CPU.

:func:`no_host` forbids what a capture forbids or freezes; :class:`Recording` replays a step's ops with everything
that Python computed frozen, as a graph does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import lighttransfer
from lighttransfer.paging.block_table import BlockTable

PACKAGE = str(Path(lighttransfer.__file__).parent)
TORCH = str(Path(torch.__file__).parent)

#: Ops whose result the host waits for, in whoever's code.
HOST_READS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
#: Ops that move data without giving a new tensor; in our code they would bring something from the host.
COPIES = {"aten::copy_", "aten::lift_fresh", "aten::set_", "aten::resize_"}
#: Methods that read a CPU tensor without any op.
READERS = ("tolist", "numpy", "__array__", "cpu", "__dlpack__")


class Forbidden(AssertionError):
    """The host took part in a step that is the device's alone."""


def is_ours(frame: FrameType | None) -> bool:
    """Whether the innermost frame outside of torch is this package's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return True
        if not name.startswith((TORCH, "<", __file__)):
            return False
        frame = frame.f_back
    return False


class _NoHost(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name in HOST_READS:
            raise Forbidden(f"{name} makes the host wait for a value")
        if is_ours(sys._getframe(1)) and func.namespace != "lighttransfer":
            if name in COPIES:
                raise Forbidden(f"{name} in lighttransfer's own code")
            if any(result.alias_info is None for result in func._schema.returns):
                raise Forbidden(f"{name} creates a tensor in lighttransfer's own code")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host() -> Iterator[None]:
    """Raises on every value that comes from the device, and on every tensor that lighttransfer's Python creates or
    fills from the host. What the ops and the model's own modules return is theirs."""

    def forbidden(name: str) -> Any:
        def read(*_: Any, **__: Any) -> Any:
            raise Forbidden(f"Tensor.{name} makes the host wait for a value")

        return read

    with mock.patch.multiple(torch.Tensor, **{name: forbidden(name) for name in READERS}), _NoHost():
        yield


@contextmanager
def tables_on_a_device() -> Iterator[None]:
    """Block tables keep a copy apart for the ops, as on a GPU, so that bringing it up to date is an op as well."""
    build = BlockTable._build

    def build_apart(self: BlockTable, n_columns: int) -> None:
        before = getattr(self, "tensor", None)
        build(self, n_columns)
        self.tensor = before if before is not None and before.shape == self._host.shape else self._host.clone()

    with mock.patch.object(BlockTable, "_build", build_apart):
        yield


class Recording(TorchDispatchMode):
    """The ops of one call, to be run again on the same tensors: what is no tensor is frozen, as in a CUDA graph.

    >>> x = torch.ones(2)
    >>> with Recording() as recording:
    ...     y = x * 2
    >>> _ = x.fill_(3)
    >>> recording.replay(y)
    tensor([6., 6.])
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self, result: torch.Tensor) -> torch.Tensor:
        """Runs the ops again; returns what now stands for ``result``, a tensor of the recorded call."""
        now: dict[int, torch.Tensor] = {}

        def current(value: Any) -> Any:
            return now.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, recorded in self._calls:
            flat_args, spec = tree_flatten((args, kwargs))
            args_now, kwargs_now = tree_unflatten([current(value) for value in flat_args], spec)
            out = func(*args_now, **kwargs_now)
            for old, new in zip(tree_flatten(recorded)[0], tree_flatten(out)[0], strict=True):
                if isinstance(old, torch.Tensor):
                    now[id(old)] = new
        return tree_map(current, result)
