"""Calls of several tokens: prompts, chunks of prompts, later turns, drafts to verify.

The chunk's queries see the keys that are cached and those of the chunk itself. The cached ones are gathered in position
order, so that attention over ``cached + chunk`` is one call of ``prefill_attn``. In a ring the positions that were
dropped are missing between sinks and recent ones; the streaming mask by index still is the mask by position, because it
counts sinks from the row's start and the window from the row's end, and both ends are there without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..selection import LayerSignal
from .calls import Call, Keys, PromptStep
from .last_queries import LastQueries
from .padding import over_padding
from .signals import kept_attention, retained_mass
from .sink_logit import apply_sink_logit, sink_logit_mass
from .undo import ChunkUndo

if TYPE_CHECKING:
    from .layer import CacheLayer


def _join(cached: Keys, k: Tensor, v: Tensor, starts: Sequence[int]) -> Keys:
    """Cached keys and the chunk behind them, in one run without padding in between."""
    n_cached, device = cached.k.shape[1], k.device
    k, v = torch.cat((cached.k, k), dim=1), torch.cat((cached.v, v), dim=1)
    if not any(starts):
        return Keys(k, v, cached.start)
    n_padding = torch.tensor(starts, device=device)  # the chunk's own, which lies between the two
    index = over_padding(n_cached, k.shape[1], n_padding)  # [B, S_k]
    row = torch.arange(len(starts), device=device)[:, None]
    assert cached.start is not None
    return Keys(k[row, index], v[row, index], cached.start + n_padding.int())


def _visible_keys(layer: CacheLayer, rows: Sequence[int], call: Call, step: PromptStep) -> Keys:
    """What the queries of ``call``, the chunk of ``rows``, may see."""
    if not step.is_first:
        return _join(layer.gather(rows, step.lengths), call.k, call.v, [step.starts[row] for row in rows])
    start = step.seq_start(call.k.device)
    if start is not None and len(rows) < len(step.starts):
        start = start[torch.tensor(rows, device=start.device)]
    return Keys(call.k, call.v, start)


def attend(layer: CacheLayer, call: Call, step: PromptStep) -> Tensor:
    """The chunk's attention in one layer, ``[B, S, H_q, D]``; its keys and values go into the cache."""
    ring = [row for row, n in enumerate(layer.recent) if n > 0]
    full = [row for row, n in enumerate(layer.recent) if n == 0]
    if not full:
        out = _attend_ring(layer, ring, call, step)
    elif not ring:
        out = _attend_full(layer, full, call, step)
    else:
        out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
        for rows, attend_rows in ((ring, _attend_ring), (full, _attend_full)):
            out[torch.tensor(rows, device=out.device)] = attend_rows(layer, rows, call.rows(rows), step)
    if not layer.appended:
        layer.append(call.k, call.v, step)
    return out


def _attend_ring(layer: CacheLayer, rows: Sequence[int], call: Call, step: PromptStep) -> Tensor:
    keys = _visible_keys(layer, rows, call, step)
    if layer.record_past:
        layer.undo[-1] = ChunkUndo(list(rows), [step.lengths[row] for row in rows], keys)
    out, lse = ops.prefill_attn(
        call.q,
        keys.k,
        keys.v,
        scale=call.scale,
        n_sink=layer.n_sink,
        n_recent=layer.window.n_recent,
        seq_start=keys.start,
    )
    return out if call.sink_logit is None else apply_sink_logit(out, lse, call.sink_logit)[0]


def _attend_full(layer: CacheLayer, rows: Sequence[int], call: Call, step: PromptStep) -> Tensor:
    cache = layer.cache
    keys = _visible_keys(layer, rows, call, step)
    is_scored = layer.competes and not cache.settings.policy.is_fixed
    if is_scored and step.decides:
        return _attend_and_choose(layer, rows, call, keys, step)
    out, lse = ops.prefill_attn(call.q, keys.k, keys.v, scale=call.scale, seq_start=keys.start)
    if call.sink_logit is not None:
        out, _ = apply_sink_logit(out, lse, call.sink_logit)
    if is_scored and step.keeps_queries:
        _remember_queries(layer, rows, call, out, lse, step)
    elif layer.competes and step.decides:
        cache.choice.take_fixed(layer, step)
    if is_scored and step.measures:
        _measure_drafts(layer, rows, call, keys, out, lse)
    return out


def _attend_and_choose(layer: CacheLayer, rows: Sequence[int], call: Call, keys: Keys, step: PromptStep) -> Tensor:
    """Attention that also measures the layer, so that a layer can be cut before the next one's keys come."""
    n_last = layer.cache.settings.n_last
    n = min(n_last, call.q.shape[1])
    out: Tensor
    out, lse, mass = ops.prefill_attn_lazy(
        call.q,
        keys.k,
        keys.v,
        n_sink=layer.n_sink,
        n_recent=layer.window.n_recent,
        n_last=n_last,
        scale=call.scale,
        seq_start=keys.start,
    )
    if call.sink_logit is not None:
        out, weight = apply_sink_logit(out, lse, call.sink_logit)
        mass[:, :, -n:] = sink_logit_mass(mass[:, :, -n:], weight[:, :, -n:])
    last = LastQueries.of(call, out, lse, slice(-n, None))
    signal = LayerSignal(
        mass,
        step.n_queries(n_last, rows, mass.device),
        layer.window,
        lambda: kept_attention(last, keys, layer.window),
    )
    layer.cache.choice.take(layer, signal, rows, step)
    return out


def _measure_drafts(layer: CacheLayer, rows: Sequence[int], call: Call, keys: Keys, out: Tensor, lse: Tensor) -> None:
    """Measures each token of a call as the decode step that it stands for, whose window ends at itself."""
    n_tokens, n_keys = call.q.shape[1], keys.k.shape[1]
    places = [rows.index(row) if row in rows else 0 for row in range(len(layer.recent))]  # rings have nothing to choose
    for at in range(n_tokens):
        last = LastQueries.of(call, out, lse, slice(at, at + 1))
        seen = Keys(keys.k[:, : n_keys - n_tokens + at + 1], keys.v[:, : n_keys - n_tokens + at + 1], keys.start)
        mass = retained_mass(layer, last, seen)[:, :, 0]
        if len(rows) < len(places):
            mass, last = mass[places], last.select(places)
        layer.remember(mass, last)


def _remember_queries(
    layer: CacheLayer, rows: Sequence[int], call: Call, out: Tensor, lse: Tensor, step: PromptStep
) -> None:
    n_last, n_rows = layer.cache.settings.n_last, len(layer.recent)
    n = min(n_last, call.q.shape[1])
    # Clones: views would keep the whole chunk's activations alive until the prompt ends.
    last = LastQueries(call.q[:, -n:].clone(), out[:, -n:].clone(), lse[:, :, -n:].clone(), call.scale, call.sink_logit)
    if len(rows) < n_rows:  # rows whose layer is a ring already have nothing to choose; their places stay empty
        last = last.select([rows.index(row) if row in rows else 0 for row in range(n_rows)])
    if layer.last_queries is not None:
        padding = [max(0, start - (step.n_tokens - n)) for start in step.starts]
        n_padding = torch.tensor(padding, device=last.q.device) if any(padding) else None
        last = layer.last_queries.then(last, n_padding)
    layer.last_queries = last.without_last(0, n_last)
