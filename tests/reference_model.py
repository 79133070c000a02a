"""A slow, independent model of what LightTransfer computes: dense attention under literal 0/1 masks, in float64.

It shares no code with the package. A prompt and all tokens that follow it go through the model's own modules in **one**
pass without any cache; what each query may see is written down as a boolean matrix per layer. A query at position ``t``
of a layer that was cut at position ``c`` sees every key up to itself while ``t < c`` (the prefill, whose output the
method leaves alone), and ``{j <= t : j < n_sink or j > t - n_recent}`` from ``t = c`` on. A layer's native sliding
window is a second mask on top.

One pass with a mask per query gives the same numbers as a decode loop, since the keys of position ``j`` depend on query
``j`` only through that query's own mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

_NAME = "dense_reference"


def visible_keys(
    at: Sequence[int], *, cut_at: int | None = None, n_sink: int = 0, n_recent: int = 0, native_window: int | None = 0
) -> torch.Tensor:
    """bool ``[n, n]``: which of the tokens at positions ``at`` (columns) each of them sees (rows).

    A loop over pairs, on purpose. ``native_window`` 0 or ``None``: there is none.
    """
    visible = torch.zeros(len(at), len(at), dtype=torch.bool)
    for query, t in enumerate(at):
        for key, j in enumerate(at):
            kept = cut_at is None or t < cut_at or j < n_sink or j > t - n_recent
            native = not native_window or j > t - native_window
            visible[query, key] = j <= t and kept and native
    return visible


@dataclass
class LayerTrace:
    """What one layer did for one row: float64 copies."""

    #: ``[H, S, S]`` attention probabilities under the layer's mask (they sum to less than 1 with a learned sink logit).
    probabilities: torch.Tensor
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
    """Softmax over the visible keys. ``query [1, H_q, S, D]``, ``key`` and ``value [1, H_kv, S, D]``."""
    run: _Run = _active[-1]
    batch, heads, length, head_dim = query.shape
    k, v = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
    scores = query @ k.mT * (head_dim**-0.5 if scaling is None else scaling)
    visible = run.visible(module.layer_idx, native_window=sliding_window, batch=batch, length=length)
    logits = scores.masked_fill(~visible, -torch.inf)
    if s_aux is not None:
        sink = s_aux.to(logits.dtype).reshape(1, -1, 1, 1).expand(batch, -1, length, 1)
        logits = torch.cat([logits, sink], dim=-1)
    probabilities = torch.softmax(logits, dim=-1)[..., :length]
    run.layers[module.layer_idx] = LayerTrace(probabilities[0].double(), v[0].double(), sliding_window)
    return (probabilities @ v).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _dense_attention)
AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)


@dataclass
class _Run:
    """The masks of a pass: ``cut_at[row][layer]``. With more rows than entries each entry stands for equally many."""

    cut_at: Sequence[Mapping[int, int]]
    n_sink: int
    n_recent: int
    positions: Sequence[int] | None = None  # of the tokens; None: from 0 on
    layers: dict[int, LayerTrace] = field(default_factory=dict)
    masks: dict[tuple[int | None, int | None, int], torch.Tensor] = field(default_factory=dict)

    def visible(self, layer: int, *, native_window: int | None, batch: int, length: int) -> torch.Tensor:
        """bool ``[batch, 1, length, length]``."""
        rows = []
        for row in range(batch):
            key = (self.cut_at[row * len(self.cut_at) // batch].get(layer), native_window, length)
            if key not in self.masks:
                self.masks[key] = visible_keys(
                    range(length) if self.positions is None else self.positions,
                    cut_at=key[0],
                    n_sink=self.n_sink,
                    n_recent=self.n_recent,
                    native_window=native_window,
                )
            rows.append(self.masks[key])
        return torch.stack(rows)[:, None]


_active: list[_Run] = []


class ReferenceModel:
    """A copy of ``model``'s weights in ``dtype``.

    ``torch.float64`` is the reference; the model's own dtype gives the error of plain torch in that precision. Build it
    before the model is enabled, so that nothing of the package is in the copy.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float64) -> None:
        config = copy.deepcopy(model.config)
        config._experts_implementation = "eager"
        config._attn_implementation = _NAME
        self.model = type(model)(config).eval()
        self.model.generation_config = copy.deepcopy(model.generation_config)
        self.model.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()})
        for name, parameter in self.model.named_parameters():
            assert not parameter.is_meta, name
            parameter.data = parameter.data.to(dtype)
        self.dtype = dtype
        if dtype is torch.float64:
            self.model.double()

    def _call(self, run: _Run, function: Callable[[], Any]) -> Any:
        _active.append(run)
        try:
            with torch.no_grad(), _Widen() if self.dtype is torch.float64 else nullcontext():
                return function()
        finally:
            _active.pop()

    def run(
        self, ids: Sequence[int], *, cut_at: Mapping[int, int] | None = None, n_sink: int = 0, n_recent: int = 0
    ) -> Trace:
        """One row of unpadded token ids. ``cut_at[layer]`` is the first query position that sees the streaming mask."""
        run = _Run([cut_at or {}], n_sink, n_recent)
        logits = self._call(run, lambda: self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits)
        assert logits.dtype is self.dtype, "a module rounded the reference to single precision"
        return Trace(logits[0].double(), run.layers)

    def run_tail(
        self, ids: Sequence[int], positions: Sequence[int], angles: Sequence[torch.Tensor], **window: int
    ) -> torch.Tensor:
        """``[V]``: the logits after the last of some tokens, all layers streaming, at their positions and angles."""
        layers = range(self.model.config.num_hidden_layers)
        run = _Run([dict.fromkeys(layers, 0)], positions=positions, **window)
        self.model.model.rotary_emb.forward = lambda *args, **kwargs: tuple(x.to(self.dtype) for x in angles)
        try:
            return self._call(run, lambda: self.model(torch.tensor([list(ids)]), use_cache=False).logits)[0, -1]
        finally:
            del self.model.model.rotary_emb.forward

    def generate(
        self, ids: torch.Tensor, *, cut_at: Sequence[Mapping[int, int]], n_sink: int, n_recent: int, **kwargs: Any
    ) -> torch.Tensor:
        """transformers' generate over unpadded rows of equal length, recomputing every sequence at every step."""
        run = _Run(cut_at, n_sink, n_recent)
        return self._call(run, lambda: self.model.generate(ids, use_cache=False, **kwargs))


def kept_keys(length: int, *, n_sink: int, n_recent: int, n_last: int, rolling: bool = False) -> torch.Tensor:
    """bool ``[n, length]``: what a cut keeps, for each of the last ``n = min(n_last, length)`` queries.

    After a prefill the kept set is anchored at the prompt's end, the same for every query; queries that were decode
    steps (``rolling``) each have the window that ends at themselves.
    """
    rows = []
    for t in range(max(0, length - n_last), length):
        begin = (t + 1 if rolling else length) - n_recent
        rows.append([j < n_sink or j >= begin for j in range(length)])
    return torch.tensor(rows)


def _last_queries(layer: LayerTrace, length: int, n_last: int) -> torch.Tensor:
    return layer.probabilities[:, max(0, length - n_last) : length, :length]


def lazy_ratio(layer: LayerTrace, kept: torch.Tensor, n_sink: int) -> float:
    """The paper's ratio: the probability on the kept keys, mean over query heads and last queries.

    What rests on a learned sink logit, which no cut can drop, counts as kept: one minus what is dropped.
    """
    probabilities = _last_queries(layer, kept.shape[1], kept.shape[0])
    return 1.0 - float((probabilities * ~kept).sum(-1).mean())


def nonsink_peak(layer: LayerTrace, kept: torch.Tensor, n_sink: int) -> float:
    """The dropped share of the mass off the sinks: mean of each head's four largest queries, then the largest head."""
    best = 0.0
    for head in _last_queries(layer, kept.shape[1], kept.shape[0]):
        shares = []
        for query, keep in zip(head, kept, strict=True):
            off_sink = float(query[n_sink:].sum())
            kept_off_sink = float(query[n_sink:][keep[n_sink:]].sum())
            share = 0.0 if off_sink < 1e-2 else min(max(1.0 - kept_off_sink / off_sink, 0.0), 1.0)
            shares.append(share)
        top = sorted(shares, reverse=True)[:4]
        best = max(best, sum(top) / len(top))
    return best


def output_error(layer: LayerTrace, kept: torch.Tensor, n_sink: int) -> float:
    """Relative error of the output over the kept keys (and the learned sink logit): mean over queries, largest head."""
    probabilities = _last_queries(layer, kept.shape[1], kept.shape[0])
    values = layer.values[:, : kept.shape[1]]
    full = probabilities @ values
    inside = probabilities * kept
    sink_logit = 1.0 - probabilities.sum(-1, keepdim=True)
    cut = (inside / (inside.sum(-1, keepdim=True) + sink_logit)) @ values
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


def choose(
    trace: Trace,
    length: int,
    *,
    rule: str,
    n_full: int,
    n_sink: int,
    n_recent: int,
    n_last: int,
    rolling: bool = False,
) -> Choice:
    """Keeps the ``n_full`` layers with the smallest ratio, or with the largest score under the other two rules."""
    score, largest = _RULES[rule]
    kept = kept_keys(length, n_sink=n_sink, n_recent=n_recent, n_last=n_last, rolling=rolling)
    scores = {i: score(trace.layers[i], kept, n_sink) for i in trace.competing}
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
