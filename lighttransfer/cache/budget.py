"""What a request's pages take: reckoned before a prompt, and against a limit while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..paging.pool import KVPool
    from .calls import PromptStep
    from .layer import CacheLayer
    from .paged_cache import PagedCache


def prompt_pages(cache: PagedCache, pool: KVPool, step: PromptStep) -> int:
    """Pages of ``pool`` that a first prompt needs at its peak, and some decode steps after it if their number is
    known."""
    layers = cache.layers_of(pool)
    competing = [layer for layer in layers if layer.competes]
    fixed = cache.choice.fixed
    # Where scores come one layer late, one layer more is full for a while.
    late = 1 if pool.device.type == "cuda" and fixed is None else 0
    prompt, later = 0, 0
    for row, length in enumerate(step.totals):
        is_decided = cache.choice.is_decided[row] or row in step.decides
        n_full = _n_full(cache, competing) if is_decided else len(competing)
        prompt += _row_pages(cache, pool, layers, length, min(n_full + late, len(competing)))
        if cache.is_compileable:  # a pool that grows is another tensor, so it has room for the whole answer
            later += answer_pages(cache, pool, max(length, cache.max_length or 0), is_decided)
        else:
            grown = max(length, min(cache.max_length or 0, length + max(256, length // 4)))
            later += _row_pages(cache, pool, layers, grown, n_full)
    return max(prompt, later)


def answer_pages(cache: PagedCache, pool: KVPool, length: int, is_decided: bool) -> int:
    """Pages of ``pool`` that a row needs at most after its prompt, on its way to ``length`` tokens."""
    layers = cache.layers_of(pool)
    competing = [layer for layer in layers if layer.competes]
    chosen = _row_pages(cache, pool, layers, length, _n_full(cache, competing))
    if is_decided:
        return chosen
    return max(chosen, _row_pages(cache, pool, layers, min(length, cache.choice.limit + 1), len(competing)))


def _n_full(cache: PagedCache, competing: Sequence[CacheLayer]) -> int:
    """Full layers of a row among ``competing``, the layers of one pool, after its choice."""
    fixed = cache.choice.fixed
    if fixed is not None:
        return sum(layer.index in fixed for layer in competing)
    # Layers elsewhere may turn out to be the lazy ones, so each pool must hold as many full ones as there can be.
    return min(cache.choice.n_full, len(competing))


def _row_pages(cache: PagedCache, pool: KVPool, layers: Sequence[CacheLayer], length: int, n_full: int) -> int:
    """Pages of a row's ``length`` tokens with ``n_full`` of the competing ``layers`` whole and the others cut."""
    n_competing = sum(layer.competes for layer in layers)
    pages = n_full * pool.pages_for(length)
    pages += (n_competing - n_full) * pool.pages_for(cache.settings.window.n_slots(length))
    return pages + sum(pool.pages_for(layer.window.n_slots(length)) for layer in layers if not layer.competes)


def full_layers(cache: PagedCache, row: int) -> list[CacheLayer]:
    """The competing layers that ``row`` still keeps whole."""
    return [layer for layer in cache.competing if layer.recent and layer.recent[row] == 0]


def _ring_bytes(layer: CacheLayer, length: int) -> int:
    return layer.pool.page_bytes * layer.pool.pages_for(layer.window.n_slots(length))


def n_affordable(cache: PagedCache, row: int, length: int, n_bytes: int) -> int:
    """How many of the row's full layers may stay full so that it holds at most ``n_bytes`` at ``length`` tokens.

    All of them where a cut would free nothing.
    """
    full = full_layers(cache, row)
    left = n_bytes - sum(_ring_bytes(layer, length) for layer in cache.attention_layers)
    # What it costs to keep a layer whole, the dearest first: models may have layers of several sizes.
    costs = [layer.pool.page_bytes * layer.pool.pages_for(length) - _ring_bytes(layer, length) for layer in full]
    n = 0
    for cost in sorted(costs, reverse=True):
        left -= cost
        if cost > 0 and left < 0:
            return n
        n += 1
    return n


def longest_within(cache: PagedCache, row: int, n_bytes: int) -> int:
    """The length up to which the row holds at most ``n_bytes`` with the layers that it has full now.

    Rings are counted as if they were complete, so the true length may be a little larger.
    """
    rings = sum(
        layer.pool.page_bytes * layer.pool.pages_for(layer.window.size)
        for layer in cache.attention_layers
        if layer.recent[row] > 0
    )
    full = full_layers(cache, row)
    page_bytes = sum(layer.pool.page_bytes for layer in full)
    return max(0, n_bytes - rings) // page_bytes * full[0].pool.page_size
