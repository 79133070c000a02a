"""What of a model the cache has to know, and which models it refuses."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ..window import RetainedWindow


def attention_windows(config: PreTrainedConfig) -> list[RetainedWindow | None]:
    """For each layer of the model its native sliding window; ``None``: full attention, the layer competes.

    Raises:
        ValueError: a model whose attention or cache does not fit, with the reason.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("model must be decoder-only, got an encoder-decoder: its cross-attention cache has no window")
    config = config.get_text_config(decoder=True)
    _refuse(config)
    n_layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * n_layers
    windows: list[RetainedWindow | None] = []
    for index, kind in enumerate(kinds[:n_layers]):
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention" and isinstance(window, int):
            windows.append(RetainedWindow(0, window))
        else:
            raise ValueError(
                f"every layer must have full or sliding-window attention, got layer {index} with {kind!r}: it keeps no "
                "plain list of keys and values that could be cut"
            )
    return windows


def _refuse(config: PreTrainedConfig) -> None:
    """The models whose layer types look right and which still do not fit."""
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(
            "model must cache keys and values of one head_dim, got multi-head latent attention "
            f"(kv_lora_rank={config.kv_lora_rank})"
        )
    shared = getattr(config, "num_kv_shared_layers", None) or "reuse" in (
        getattr(config, "kv_sharing_modes", None) or ()
    )
    if shared:
        raise ValueError("every layer must have keys and values of its own, got a model whose layers share them")
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        raise ValueError(f"attention scores must not be capped, got attn_logit_softcapping={softcap}")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise ValueError("attention must be causal, got a bidirectional model")
    if getattr(config, "output_attentions", False):
        raise ValueError("output_attentions must be off: the kernels never hold attention weights")
