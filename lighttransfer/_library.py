"""Loads the compiled ops and calls them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

#: The op namespace that the functions of :mod:`lighttransfer.ops` call.
namespace = "lighttransfer"


def load() -> Path:
    """Loads ``_C.so`` (once) and returns its path.

    ``LIGHTTRANSFER_LIBRARY`` in the environment names another build of it, such as a sanitized one.
    """
    path = Path(os.environ.get("LIGHTTRANSFER_LIBRARY") or Path(__file__).parent / "_C.so")
    if not path.exists():
        raise ImportError(
            f"lighttransfer's compiled ops are missing: {path.name} is not in {path.parent}. "
            "Install the package with `pip install --no-build-isolation .`"
        )
    torch.ops.load_library(str(path))
    return path


def call(op: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the op; an argument error becomes the ValueError or TypeError that it is.

    The checks stand once, in ``csrc/bind``, and can only raise RuntimeError through the dispatcher.
    """
    function = getattr(getattr(torch.ops, namespace), op)
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        text = str(error)
        for kind in (ValueError, TypeError):
            prefix = f"{kind.__name__}: "
            if text.startswith(prefix):
                raise kind(text.removeprefix(prefix).split("\n")[0]) from None
        if "Expected a value of type" in text:  # the dispatcher's own check of the schema
            raise TypeError(text.split("\n")[0].removeprefix(f"{namespace}::")) from None
        raise


load()
