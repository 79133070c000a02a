"""Pages of keys and values: the pool that all layers share, and the block tables that say whose page is whose."""

from __future__ import annotations

from .block_table import BlockTable
from .pool import KVPool, PoolFullError

__all__ = ["BlockTable", "KVPool", "PoolFullError"]
