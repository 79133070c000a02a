"""The attention and mask functions that transformers calls, registered as ``"lighttransfer"``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..cache.calls import Call
from ..cache.layer import CacheLayer
from ..cache.lighttransfer_cache import NO_MASK, CacheLength

#: The name under which both are registered: ``config._attn_implementation``.
NAME = "lighttransfer"


def lighttransfer_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a :class:`LightTransferCache`; over anything else (another cache, none) the same as sdpa.

    ``query [B, H_q, S, D]``, ``key, value [B, H_kv, S, D]`` -> ``[B, S, H_q, D]``. The keys that
    :meth:`LightTransferCache.update` returned name their layer, and through it their cache.

    Raises:
        ValueError: what the kernels cannot do: attention weights, dropout, capped scores, position biases, other masks.
    """
    layer: CacheLayer | None = getattr(key, "lighttransfer_layer", None)
    if layer is None:
        return _dense_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if torch.compiler.is_compiling() and not layer.cache.decoding.is_open:
        # Lengths, pages and choices are the host's business, which no graph should freeze.
        return _untraced_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    _refuse(module, dropout, attention_mask, kwargs)
    call = Call(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scaling, kwargs.get("s_aux"))
    return layer.cache.attend(layer, call, attention_mask), None


_untraced_attention: Callable[..., tuple[Tensor, None]] = torch.compiler.disable(lighttransfer_attention)


def _refuse(module: torch.nn.Module, dropout: float, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions must be off: the kernels never hold attention weights")
    if dropout:
        raise ValueError(f"dropout must be 0 with a LightTransferCache, got {dropout}: call model.eval()")
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None with a LightTransferCache, got {type(kwargs[name]).__name__}")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("is_causal must be true with a LightTransferCache, got a bidirectional layer")
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"attention_mask must be 2D [batch, tokens] with a LightTransferCache, got {mask.ndim}D")


def _dense_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if kwargs.get("s_aux") is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
    # sdpa has no learned sink logit; the model's own attention has.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if attention_mask is None:
        n_queries, n_keys = query.shape[2], key.shape[2]
        ones = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device)
        attention_mask = ones.tril(n_keys - n_queries)[None, None]
    if attention_mask.dtype is torch.bool:
        hidden = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, hidden)
    out, _ = eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return out, None


def lighttransfer_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of :func:`lighttransfer_attention`: the 2D padding mask for a LightTransferCache, else sdpa's.

    Causality and windows are the layers' own business; padding is all that only the caller knows.

    Raises:
        ValueError: a LightTransferCache with a mask of another kind (bidirectional blocks, packed sequences, overlays).
    """
    if not isinstance(kv_length, CacheLength):
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            **kwargs,
        )
    if kv_length is NO_MASK:
        return None
    # A single query sees every key before it whatever is laid over the causal mask; only a function of one's own could
    # hide some. (transformers forbids the skip for single queries of a cache that it compiles.)
    if use_vmap or not (allow_is_causal_skip or q_length == 1):
        raise ValueError(
            "attention_mask must be a padding mask with a LightTransferCache: bidirectional blocks (images), packed "
            "sequences and mask overlays are not supported"
        )
    return attention_mask


def register() -> None:
    """Makes ``attn_implementation="lighttransfer"`` known to transformers."""
    AttentionInterface.register(NAME, lighttransfer_attention)
    AttentionMaskInterface.register(NAME, lighttransfer_mask)


register()
