"""What the last queries did in a layer, measured again over its keys: the signals that scores are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..selection import LayerSignal
from ..window import RetainedWindow
from .calls import Keys
from .last_queries import LastQueries
from .sink_logit import apply_sink_logit, sink_logit_mass, sink_logit_weight

if TYPE_CHECKING:
    from .layer import CacheLayer


def signal_from_cache(layer: CacheLayer, lengths: Sequence[int], n_queries: Sequence[int]) -> LayerSignal:
    """The last queries of a prompt in chunks, or of decode steps, over what is cached by now, which is all they see."""
    last = layer.last_queries
    assert last is not None
    keys = layer.gather(range(len(lengths)), lengths)
    mass = retained_mass(layer, last, keys)
    counts = [min(n, last.q.shape[1]) for n in n_queries]
    real = torch.tensor(counts, dtype=torch.int32, device=mass.device)
    return LayerSignal(mass, real, layer.window, lambda: kept_attention(last, keys, layer.window))


def retained_mass(layer: CacheLayer, last: LastQueries, keys: Keys) -> Tensor:
    """``[B, H_q, n, 2]``: what the queries put on the window that ends with ``keys``."""
    mass = ops.retained_mass(
        last.q,
        keys.k,
        last.lse,
        n_sink=layer.n_sink,
        n_recent=layer.window.n_recent,
        scale=last.scale,
        seq_start=keys.start,
    )
    if last.sink_logit is not None:
        mass = sink_logit_mass(mass, sink_logit_weight(last.lse, last.sink_logit))
    return mass


def kept_attention(last: LastQueries, keys: Keys, window: RetainedWindow) -> tuple[Tensor, Tensor]:
    """The last queries' outputs over all keys and over the kept keys alone: :attr:`LayerSignal.kept_attention`.

    Rows inside the window get no meaning; nothing is chosen on them.
    """
    n_keys, device = keys.k.shape[1], keys.k.device
    n = min(last.q.shape[1], window.n_recent)  # queries that lie in the window themselves, so that they see every sink
    size = min(window.size, n_keys)
    sinks = torch.arange(min(window.n_sink, size), device=device)
    recent = torch.arange(n_keys - (size - sinks.numel()), n_keys, device=device)
    if keys.start is None:
        index = torch.cat((sinks, recent))
        k, v = keys.k[:, index], keys.v[:, index]
    else:
        start = keys.start[:, None].long()
        per_row = torch.cat((start + sinks, recent.expand(start.shape[0], -1)), dim=1).clamp_max(n_keys - 1)
        row = torch.arange(start.shape[0], device=device)[:, None]
        k, v = keys.k[row, per_row], keys.v[row, per_row]
    out, lse = ops.prefill_attn(last.q[:, -n:], k, v, scale=last.scale)
    if last.sink_logit is not None:
        out, _ = apply_sink_logit(out, lse, last.sink_logit)
    return last.out[:, -n:], out
