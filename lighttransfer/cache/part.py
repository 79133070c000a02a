"""What the parts of a cache have in common."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .paged_cache import PagedCache


class CachePart:
    """A part of a cache that asks the cache for the rest.

    Weakly: the cache owns its parts, and its memory is to be freed with its last user, not when cycles are looked for.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache_ref = weakref.ref(cache)

    @property
    def cache(self) -> PagedCache:
        """The cache that the part belongs to."""
        cache = self._cache_ref()
        assert cache is not None
        return cache

    def belong_to(self, cache: PagedCache) -> None:
        """Moves it to a copy of its cache."""
        self._cache_ref = weakref.ref(cache)
