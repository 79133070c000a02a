"""What a cache did: the answer to "which layers stream, and what did it save?"."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lighttransfer_cache import LightTransferCache


@dataclass(frozen=True)
class RequestReport:
    """One row of the batch.

    Attributes:
        length: its tokens so far, without padding.
        is_decided: whether its layers are chosen; a short prompt's choice is deferred.
        full_layers, streaming_layers: the full-attention layers that it keeps whole, and that were cut. While nothing
            is decided all are full.
        scores: what the policy measured, per layer; empty for a fixed policy, or before the choice.
        bytes_held: K/V bytes of its pages now, native sliding-window layers included.
        peak_bytes: the largest ``bytes_held`` so far.
        bytes_full: what its pages would take if no layer streamed.
        bytes_freed: ``bytes_full - bytes_held``.
    """

    length: int
    is_decided: bool
    full_layers: list[int]
    streaming_layers: list[int]
    scores: dict[int, float]
    bytes_held: int
    peak_bytes: int
    bytes_full: int
    bytes_freed: int


@dataclass(frozen=True)
class CacheReport:
    """A cache and its requests.

    Attributes:
        policy: the rule's name; ``n_sink``, ``n_recent``, ``n_last``: see :class:`~lighttransfer.settings.Settings`.
        n_layers: the model's layers; ``competing_layers``: those with full attention.
        requests: one report for each row.
        bytes_in_use: K/V bytes of all pages in use now; pages that rows share count once.
        peak_bytes: the largest ``bytes_in_use`` so far.
        storage_bytes, peak_storage_bytes: bytes of the pools' storages, free pages included.
    """

    policy: str
    n_sink: int
    n_recent: int
    n_last: int
    n_layers: int
    competing_layers: list[int]
    requests: list[RequestReport]
    bytes_in_use: int
    peak_bytes: int
    storage_bytes: int
    peak_storage_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def to_json(self, **options: Any) -> str:
        """The report as JSON; ``options`` go to :func:`json.dumps`."""
        return json.dumps(self.to_dict(), **options)


def make_report(cache: LightTransferCache) -> CacheReport:
    """See :meth:`LightTransferCache.report`."""
    settings = cache.settings
    pools = cache.pools.values()
    return CacheReport(
        policy=settings.policy.name,
        n_sink=settings.n_sink,
        n_recent=settings.n_recent,
        n_last=settings.n_last,
        n_layers=len(cache.attention_layers),
        competing_layers=[layer.index for layer in cache.competing],
        requests=[_request(cache, row) for row in range(len(cache.lengths))],
        bytes_in_use=sum(pool.bytes_in_use for pool in pools),
        peak_bytes=sum(pool.peak_bytes_in_use for pool in pools),
        storage_bytes=sum(pool.storage_bytes for pool in pools),
        peak_storage_bytes=sum(pool.peak_storage_bytes for pool in pools),
    )


def _request(cache: LightTransferCache, row: int) -> RequestReport:
    length = cache.lengths[row]
    streaming = [layer.index for layer in cache.competing if layer.recent and layer.recent[row] > 0]
    full_bytes = sum(
        layer.pool.page_bytes * layer.pool.pages_for(length if layer.competes else layer.window.n_slots(length))
        for layer in cache.attention_layers
        if layer.is_initialized
    )
    held = cache.row_bytes[row]
    return RequestReport(
        length=length,
        is_decided=cache.choice.is_decided[row],
        full_layers=[layer.index for layer in cache.competing if layer.index not in streaming],
        streaming_layers=streaming,
        scores=dict(cache.choice.scores[row]),
        bytes_held=held,
        peak_bytes=cache.peak_row_bytes[row],
        bytes_full=full_bytes,
        bytes_freed=full_bytes - held,
    )
