"""A slow, independent model of what LightTransfer computes: dense attention under literal 0/1 masks, in float64.

It shares no code with the package. A prompt and all tokens that follow it go through the model's own modules in **one** pass
without any cache; what each query may see is written down as a boolean matrix per layer. A query at position ``t`` of a layer
that was cut at position ``c`` sees every key up to itself while ``t < c`` (the prefill, whose output the method leaves alone), and
``{j <= t : j < n_sink or j > t - n_recent}`` from ``t = c`` on. A layer's native sliding window is a second mask on top.

One pass with a mask per query gives the same numbers as a decode loop, since the keys of position ``j`` depend on query ``j`` only
through that query's own mask.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

_NAME = "dense_reference"


def visible_keys(
    length: int, *, cut_at: int | None = None, n_sink: int = 0, n_recent: int = 0, native_window: int | None = None
) -> torch.Tensor:
    """bool ``[length, length]``: which key (column) each query (row) sees. Written as a loop over pairs, on purpose."""
    visible = torch.zeros(length, length, dtype=torch.bool)
    for t in range(length):
        for j in range(t + 1):
            kept = cut_at is None or t < cut_at or j < n_sink or j > t - n_recent
            native = native_window is None or j > t - native_window
            visible[t, j] = kept and native
    return visible


@dataclass
class LayerTrace:
    """What one layer did for one row: float64 copies."""

    #: ``[H, S, S]`` attention probabilities under the layer's mask (they sum to less than 1 with a learned sink logit).
    probabilities: torch.Tensor
    #: ``[H, S, S]`` scaled scores before mask and softmax.
    scores: torch.Tensor
    #: ``[H, S, D]`` values, repeated for every query head.
    values: torch.Tensor
    #: the layer's native sliding window, if it has one.
    native_window: int | None


@dataclass
class Trace:
    """The result of one pass over one row."""

    #: ``[S, V]``: the logits after each token.
    logits: torch.Tensor
    layers: dict[int, LayerTrace] = field(default_factory=dict)

    @property
    def competing(self) -> list[int]:
        """The layers that may be cut: those with no native window."""
        return [i for i, layer in sorted(self.layers.items()) if layer.native_window is None]


class _Widen(TorchFunctionMode):
    """Turns the casts to float32 that models write into their norms and rotary embeddings into casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax over the visible keys, one matrix product at a time. ``query [1, H_q, S, D]``, ``key/value [1, H_kv, S, D]``."""
    run: _Run = _active[-1]
    groups = query.shape[1] // key.shape[1]
    q = query[0]
    k, v = (x[0].repeat_interleave(groups, dim=0) for x in (key, value))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    visible = run.visible(module.layer_idx, native_window=sliding_window, length=q.shape[1])
    logits = scores.masked_fill(~visible, -torch.inf)
    if s_aux is not None:
        sink = s_aux.to(logits.dtype).reshape(-1, 1, 1).expand(-1, logits.shape[1], 1)
        logits = torch.cat([logits, sink], dim=-1)
    probabilities = torch.softmax(logits, dim=-1)[..., : k.shape[1]]
    run.layers[module.layer_idx] = LayerTrace(
        probabilities.detach().double(), scores.detach().double(), v.detach().double(), sliding_window
    )
    return (probabilities @ v)[None].transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _dense_attention)
AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)


@dataclass
class _Run:
    cut_at: Mapping[int, int]
    n_sink: int
    n_recent: int
    layers: dict[int, LayerTrace] = field(default_factory=dict)
    masks: dict[tuple[int | None, int | None], torch.Tensor] = field(default_factory=dict)

    def visible(self, layer: int, *, native_window: int | None, length: int) -> torch.Tensor:
        key = (self.cut_at.get(layer), native_window)
        if key not in self.masks:
            self.masks[key] = visible_keys(
                length, cut_at=key[0], n_sink=self.n_sink, n_recent=self.n_recent, native_window=native_window
            )
        return self.masks[key]


_active: list[_Run] = []


class ReferenceModel:
    """A copy of ``model``'s weights in ``dtype``. ``torch.float64`` is the reference; the model's own dtype gives the error of plain torch.

    Build it before the model is enabled, so that nothing of the package is in the copy.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float64) -> None:
        config = copy.deepcopy(model.config)
        config._experts_implementation = "eager"
        config._attn_implementation = _NAME
        self.model = type(model)(config).eval()
        self.model.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()})
        for name, parameter in self.model.named_parameters():
            assert not parameter.is_meta, name
            parameter.data = parameter.data.to(dtype)
        self.dtype = dtype
        if dtype is torch.float64:
            self.model.double()

    @torch.no_grad()
    def run(
        self, ids: Sequence[int], *, cut_at: Mapping[int, int] | None = None, n_sink: int = 0, n_recent: int = 0
    ) -> Trace:
        """One row of unpadded token ids. ``cut_at[layer]`` is the first query position that sees the streaming mask."""
        run = _Run(dict(cut_at or {}), n_sink, n_recent)
        _active.append(run)
        try:
            tokens = torch.tensor([list(ids)])
            if self.dtype is torch.float64:
                with _Widen():
                    logits = self.model(input_ids=tokens, use_cache=False).logits
            else:
                logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            _active.pop()
        if self.dtype is torch.float64:
            assert logits.dtype is torch.float64, "a module rounded the reference to single precision"
        return Trace(logits[0].double(), run.layers)


def kept_keys(length: int, *, n_sink: int, n_recent: int) -> torch.Tensor:
    """bool ``[length]``: the keys of a prompt that a cut layer keeps, a set anchored at the prompt's end."""
    return torch.tensor([j < n_sink or j >= length - n_recent for j in range(length)])


def _last_queries(layer: LayerTrace, length: int, n_last: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = slice(max(0, length - n_last), length)
    return layer.probabilities[:, rows, :length], layer.scores[:, rows, :length]


def lazy_ratio(layer: LayerTrace, length: int, *, n_sink: int, n_recent: int, n_last: int) -> float:
    """The paper's ratio: the probability on the kept keys, mean over query heads and last queries."""
    probabilities, _ = _last_queries(layer, length, n_last)
    return float(probabilities[..., kept_keys(length, n_sink=n_sink, n_recent=n_recent)].sum(-1).mean())


def nonsink_peak(layer: LayerTrace, length: int, *, n_sink: int, n_recent: int, n_last: int) -> float:
    """The dropped share of the mass that is not on the sinks: mean of each head's four largest queries, then the largest head."""
    probabilities, _ = _last_queries(layer, length, n_last)
    kept = kept_keys(length, n_sink=n_sink, n_recent=n_recent)
    sinks = torch.arange(length) < n_sink
    best = 0.0
    for head in probabilities:
        shares = []
        for query in head:
            off_sink = 1.0 - float(query[sinks].sum())
            kept_off_sink = float(query[kept & ~sinks].sum())
            share = 0.0 if off_sink < 1e-2 else min(max(1.0 - kept_off_sink / off_sink, 0.0), 1.0)
            shares.append(share)
        top = sorted(shares, reverse=True)[:4]
        best = max(best, sum(top) / len(top))
    return best


def output_error(layer: LayerTrace, length: int, *, n_sink: int, n_recent: int, n_last: int) -> float:
    """How far the output moves when only the kept keys are attended to: relative error, mean over queries, largest head."""
    probabilities, _ = _last_queries(layer, length, n_last)
    values = layer.values[:, :length]
    kept = kept_keys(length, n_sink=n_sink, n_recent=n_recent)
    full = probabilities @ values
    inside = probabilities * kept
    cut = (inside / inside.sum(-1, keepdim=True)) @ values
    error = (full - cut).norm(dim=-1) / cut.norm(dim=-1)
    return float(error.mean(-1).max())


@dataclass(frozen=True)
class Choice:
    """Which of the competing layers a request keeps, and how clearly."""

    full: frozenset[int]
    streaming: frozenset[int]
    scores: dict[int, float]
    #: distance between the last score that is kept and the first that is not.
    gap: float


_RULES = {"lazy_ratio": (lazy_ratio, False), "nonsink_peak": (nonsink_peak, True), "output_error": (output_error, True)}


def choose(trace: Trace, length: int, *, rule: str, n_full: int, n_sink: int, n_recent: int, n_last: int) -> Choice:
    """Keeps the ``n_full`` layers with the smallest ratio, or with the largest score under the other two rules."""
    score, largest = _RULES[rule]
    scores = {
        i: score(trace.layers[i], length, n_sink=n_sink, n_recent=n_recent, n_last=n_last) for i in trace.competing
    }
    # Equal scores: the earlier layer is evicted first, so the later one comes first among those kept.
    order = sorted(scores, key=lambda i: (-scores[i] if largest else scores[i], -i))
    full, streaming = order[:n_full], order[n_full:]
    gap = abs(scores[full[-1]] - scores[streaming[0]]) if full and streaming else float("inf")
    return Choice(frozenset(full), frozenset(streaming), scores, gap)


def assert_as_close_as_plain_torch(
    actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, *, what: str, factor: float = 2.0
) -> None:
    """The largest error against float64 is at most ``factor`` times that of plain torch in the same precision."""
    actual = actual.double()
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, reference {tuple(exact.shape)}"
    assert torch.equal(torch.isfinite(actual), torch.isfinite(exact)), f"{what}: inf/NaN in other places"
    error, allowed = float((actual - exact).abs().max()), factor * float((plain - exact).abs().max())
    assert error <= allowed, f"{what}: largest error {error:.3g}, plain torch has {allowed / factor:.3g}"
