"""LightTransfer (arXiv:2410.13846): a pretrained transformer as a hybrid model, without retraining.

:func:`enable` turns a transformers model into a hybrid one; :class:`LightTransferCache` is its cache;
:mod:`lighttransfer.ops` are the kernels, which need torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _library as _library  # loads the ops
from . import ops
from .paging import KVPool, PoolFullError
from .settings import Settings
from .window import RetainedWindow

if TYPE_CHECKING:
    from .cache import LightTransferCache
    from .integration import disable, enable

__version__ = "0.1.0"
__all__ = [
    "KVPool",
    "LightTransferCache",
    "PoolFullError",
    "RetainedWindow",
    "Settings",
    "disable",
    "enable",
    "ops",
]

#: What needs transformers is imported when it is asked for: the ops do without.
_LAZY = {"LightTransferCache": "cache", "disable": "integration", "enable": "integration"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(".integration", __name__)  # a cache is of no use to a model that cannot attend to it
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
