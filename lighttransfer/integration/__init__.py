"""What makes a transformers model use the cache: its attention function, and its ``generate``."""

from __future__ import annotations

from .enabling import disable, enable

__all__ = ["disable", "enable"]
