"""The hybrid cache: full layers and ring layers over one paged pool, as a transformers ``Cache``."""

from __future__ import annotations

from .lighttransfer_cache import LightTransferCache
from .report import CacheReport, RequestReport

__all__ = ["CacheReport", "LightTransferCache", "RequestReport"]
