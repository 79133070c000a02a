"""Which layers keep their whole cache: the rules, and the bounded heap that applies them during prefill.

A *policy* is a small dataclass. A fixed one names the full layers beforehand. A scored one turns what a layer's
attention did in the last queries of a prompt (:class:`LayerSignal`) into one number per request, from which the heap of
:class:`LayerSelector` evicts as the layers arrive. A new rule is a new dataclass; see :class:`LazyRatio`.

A score does not depend on the other requests of the batch, and only through :func:`reduce_over_ranks` on how the heads
are sharded: it is a mean or a maximum over heads, which is reduced over all ranks before the heap sees it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from . import ops
from ._arguments import check_count
from .window import RetainedWindow


@dataclass
class LayerSignal:
    """What one layer's attention did in the last queries of each request.

    Attributes:
        mass: ``[B, H_q, n_last, 2]`` fp32: the probability that each query put on the sinks and on the other kept keys.
        n_queries: ``[B]`` int32: how many trailing queries are real; ``None``: all.
        window: the window that the layer would be cut to.
        kept_attention: returns ``(out, out_kept)``, both ``[B, n, H_q, D]``: the outputs of the last queries over all
            keys, and over the kept keys alone. A function, because only some rules pay for it; its queries are the
            trailing ``n <= n_last`` ones. ``None`` where it cannot be had.
    """

    mass: Tensor
    n_queries: Tensor | None
    window: RetainedWindow
    kept_attention: Callable[[], tuple[Tensor, Tensor]] | None = None

    def real_queries(self) -> Tensor:
        """``[B, 1, n_last]`` bool: which queries are real."""
        n_last = self.mass.shape[2]
        index = torch.arange(n_last, device=self.mass.device)
        if self.n_queries is None:
            return torch.ones(self.mass.shape[0], 1, n_last, dtype=torch.bool, device=self.mass.device)
        return (index >= n_last - self.n_queries[:, None])[:, None]


class Policy:
    """A rule that says which layers keep their whole cache.

    Class attributes:
        name: what :func:`make_policy` calls it.
        keeps: which scores stay full, ``"smallest"`` or ``"largest"``; ``None``: the policy is fixed.
        reduction: over heads, ``"mean"`` or ``"max"``, so that tensor parallel ranks can finish it.
        needs_outputs: whether :meth:`score` calls :attr:`LayerSignal.kept_attention`.
    """

    name: ClassVar[str]
    keeps: ClassVar[Literal["smallest", "largest"] | None] = None
    reduction: ClassVar[Literal["mean", "max"]] = "mean"
    needs_outputs: ClassVar[bool] = False

    @property
    def is_fixed(self) -> bool:
        """Whether the full layers are known before any token is seen."""
        return self.keeps is None

    def full_layers(self, layers: Sequence[int], n_full: int) -> frozenset[int]:
        """A fixed policy's full layers, out of the competing ``layers`` (model indices, in order)."""
        raise NotImplementedError(f"{type(self).__name__} is no fixed policy")

    def score(self, signal: LayerSignal) -> Tensor:
        """A scored policy's score of one layer, fp32 ``[B]``, over this rank's heads."""
        raise NotImplementedError(f"{type(self).__name__} is no scored policy")

    def laziness(self, score: float) -> float:
        """The score as the heap orders it: the laziest layer has the largest. A NaN counts as laziest."""
        if math.isnan(score):
            return math.inf
        return score if self.keeps == "smallest" else -score

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which :func:`make_policy` builds the policy again."""
        values: dict[str, Any] = asdict(self) if is_dataclass(self) else {}
        return {"name": self.name, **values}


@dataclass(frozen=True)
class LazyRatio(Policy):
    """The paper's rule: the mean probability on the kept keys (arXiv:2410.13846, section 3.2). Small stays full."""

    name: ClassVar[str] = "lazy_ratio"
    keeps: ClassVar[Literal["smallest", "largest"] | None] = "smallest"

    def score(self, signal: LayerSignal) -> Tensor:
        ratio: Tensor = ops.lazy_ratio(signal.mass, n_queries=signal.n_queries)
        return ratio


@dataclass(frozen=True)
class NonsinkPeak(Policy):
    """How much of what does not rest on the sinks a cut would drop, where a head needs it most. Large stays full.

    ``n = 1 - m / (1 - s)`` per head and query, with ``s`` on the sinks and ``m`` on the other kept keys; clipped to
    [0, 1], and 0 where ``1 - s`` is below ``floor``, where the head idles. Each head's mean over its ``top_queries``
    largest, then the maximum over heads. Mass that rests on sinks carries next to no output, so it says nothing about
    what a cut costs.
    """

    top_queries: int = 4
    floor: float = 1e-2

    name: ClassVar[str] = "nonsink_peak"
    keeps: ClassVar[Literal["smallest", "largest"] | None] = "largest"
    reduction: ClassVar[Literal["mean", "max"]] = "max"

    def __post_init__(self) -> None:
        check_count("top_queries", self.top_queries, 1)
        if not 0 < self.floor < 1:
            raise ValueError(f"floor must lie between 0 and 1, got {self.floor}")

    def score(self, signal: LayerSignal) -> Tensor:
        sinks, others = signal.mass.unbind(-1)  # [B, H_q, n_last]
        rest = 1 - sinks
        dropped = (1 - others / rest.clamp_min(self.floor)).clamp(0, 1)
        dropped = dropped.where((rest >= self.floor) & signal.real_queries(), 0.0)
        top = min(self.top_queries, dropped.shape[-1])
        peaks = dropped.topk(top, dim=-1).values.sum(-1)  # [B, H_q]
        if signal.n_queries is None:
            return (peaks / top).amax(-1)
        return (peaks / signal.n_queries.clamp(1, top)[:, None]).amax(-1)


@dataclass(frozen=True)
class OutputError(Policy):
    """How far a cut would move the layer's output: ``|o - o_kept| / |o_kept|`` per head. Large stays full.

    Mean over the last queries, maximum over heads. Costs one small attention call per layer.
    """

    name: ClassVar[str] = "output_error"
    keeps: ClassVar[Literal["smallest", "largest"] | None] = "largest"
    reduction: ClassVar[Literal["mean", "max"]] = "max"
    needs_outputs: ClassVar[bool] = True

    def score(self, signal: LayerSignal) -> Tensor:
        if signal.kept_attention is None:
            raise ValueError("output_error must see the layer's outputs, got a signal without kept_attention")
        out, kept = signal.kept_attention()  # [B, n, H_q, D]
        out, kept = out.float(), kept.float()
        tiny = torch.finfo(torch.float32).tiny
        error = (out - kept).norm(dim=-1) / kept.norm(dim=-1).clamp_min(tiny)  # [B, n, H_q]
        real = signal.real_queries()[:, 0, -error.shape[1] :, None]  # [B, n, 1]
        mean: Tensor = (error * real).sum(1) / real.sum(1).clamp_min(1)  # [B, H_q]
        return mean.amax(-1)


@dataclass(frozen=True)
class StaticLayers(Policy):
    """A given list of full layers, the setting of LightTransfer-Train. Needs no signal, so short prompts stream too."""

    layers: tuple[int, ...]

    name: ClassVar[str] = "static"

    def __init__(self, layers: Sequence[int]) -> None:
        object.__setattr__(self, "layers", tuple(sorted({check_count("layers", int(x), 0) for x in layers})))

    def full_layers(self, layers: Sequence[int], n_full: int) -> frozenset[int]:
        unknown = sorted(set(self.layers) - set(layers))
        if unknown:
            raise ValueError(f"layers must be full-attention layers of the model ({list(layers)}), got {unknown}")
        return frozenset(self.layers)


@dataclass(frozen=True)
class RandomLayers(Policy):
    """``n_full`` layers drawn with ``seed``, the same for every request: a baseline."""

    seed: int = 0

    name: ClassVar[str] = "random"

    def full_layers(self, layers: Sequence[int], n_full: int) -> frozenset[int]:
        return frozenset(random.Random(self.seed).sample(list(layers), n_full))


@dataclass(frozen=True)
class FirstLayers(Policy):
    """The first ``n_full`` layers: a baseline."""

    name: ClassVar[str] = "first"

    def full_layers(self, layers: Sequence[int], n_full: int) -> frozenset[int]:
        return frozenset(layers[:n_full])


@dataclass(frozen=True)
class LastLayers(Policy):
    """The last ``n_full`` layers: a baseline."""

    name: ClassVar[str] = "last"

    def full_layers(self, layers: Sequence[int], n_full: int) -> frozenset[int]:
        return frozenset(layers[len(layers) - n_full :])


_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (LazyRatio, NonsinkPeak, OutputError, StaticLayers, RandomLayers, FirstLayers, LastLayers)
}


def make_policy(policy: str | dict[str, Any] | Policy) -> Policy:
    """A policy from its name, from ``{"name": ..., **fields}`` (what :meth:`Policy.to_dict` returns), or itself.

    Raises:
        ValueError: no policy of that name; a field's value outside its range.
        TypeError: a field that the policy lacks, or needs and does not get.
    """
    if isinstance(policy, Policy):
        return policy
    fields = dict(policy) if isinstance(policy, dict) else {"name": policy}
    name = fields.pop("name", None)
    if name not in _POLICIES:
        raise ValueError(f"policy must be one of {sorted(_POLICIES)}, got {name!r}")
    return _POLICIES[name](**fields)


class LayerSelector:
    """The paper's bounded heap (arXiv:2410.13846, algorithm 1) for one request.

    Layers arrive in order with their laziness; at most ``n_full`` are held. One more, and the laziest held layer is
    evicted: of equally lazy ones the earlier.

    Example:
        >>> selector = LayerSelector(n_full=2)
        >>> [selector.push(layer, laziness) for layer, laziness in enumerate([0.9, 0.2, 0.9, 0.1])]
        [None, None, 0, 2]
        >>> selector.full
        frozenset({1, 3})
    """

    def __init__(self, n_full: int) -> None:
        self.n_full = check_count("n_full", n_full, 0)
        self._heap: list[tuple[float, int]] = []  # (-laziness, layer): the root is the next to go

    @property
    def full(self) -> frozenset[int]:
        """The layers held."""
        return frozenset(layer for _, layer in self._heap)

    def push(self, layer: int, laziness: float) -> int | None:
        """Takes in a layer; returns the layer that has to be cut now, if one has to."""
        entry = (-laziness, layer)
        if len(self._heap) < self.n_full:
            heapq.heappush(self._heap, entry)
            return None
        return heapq.heappushpop(self._heap, entry)[1]


def reduce_over_ranks(score: Tensor, reduction: Literal["mean", "max"], group: Any = None) -> Tensor:
    """A score over this rank's heads as the score over all heads of the tensor parallel ``group``; ``None``: one rank.

    Every rank holds equally many heads, so the mean of the ranks' means is the mean over heads.
    """
    if group is None:
        return score
    import torch.distributed as dist

    score = score.contiguous()
    if reduction == "max":
        dist.all_reduce(score, op=dist.ReduceOp.MAX, group=group)
        return score
    dist.all_reduce(score, group=group)
    return score / dist.get_world_size(group)
