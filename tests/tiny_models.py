"""Causal language models with tiny random weights, one factory per architecture that the tests cover.

The default initialisation (std 0.02) makes attention nearly uniform, so that a wrong mask would hardly move a logit.
Here every matrix has unit gain and queries and keys a larger one: attention is peaked, layers and prompts differ, and a
wrong mask moves logits, whose standard deviation is 1, by tenths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 97
PAD = 0

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def _config(cls: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    return cls(**{**_COMMON, **changes})


def llama(**changes: Any) -> PreTrainedConfig:
    return _config(transformers.LlamaConfig, **changes)


def mistral(**changes: Any) -> PreTrainedConfig:
    return _config(transformers.MistralConfig, **{"sliding_window": None, **changes})


def mistral_sliding(**changes: Any) -> PreTrainedConfig:
    """Every layer has a native window of 12: none of them competes."""
    return _config(transformers.MistralConfig, **{"sliding_window": 12, **changes})


def qwen2(**changes: Any) -> PreTrainedConfig:
    return _config(transformers.Qwen2Config, **changes)


def qwen2_sliding(**changes: Any) -> PreTrainedConfig:
    """Layers 3 and 4 of five have a native window of 12."""
    return _config(
        transformers.Qwen2Config,
        **{"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 3, **changes},
    )


def qwen3(**changes: Any) -> PreTrainedConfig:
    return _config(transformers.Qwen3Config, **changes)


def mixtral(**changes: Any) -> PreTrainedConfig:
    return _config(transformers.MixtralConfig, **{"num_local_experts": 4, "num_experts_per_tok": 2, **changes})


def qwen2_moe(**changes: Any) -> PreTrainedConfig:
    """Experts of which two are chosen, and one that every token goes through."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    sizes = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    return _config(transformers.Qwen2MoeConfig, **{**experts, **sizes, **changes})


def qwen3_moe(**changes: Any) -> PreTrainedConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return _config(transformers.Qwen3MoeConfig, **{**experts, **changes})


def gemma2(**changes: Any) -> PreTrainedConfig:
    """Sliding and full layers in turn. Without its cap on attention scores, with which it is refused."""
    return _config(
        transformers.Gemma2Config,
        **{
            "num_hidden_layers": 6,
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
            "eos_token_id": None,
            **changes,
        },
    )


def gemma3(**changes: Any) -> PreTrainedConfig:
    """Six layers; the second and the fifth are full, the others have a native window of 12."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"] * 2
    return _config(
        transformers.Gemma3TextConfig,
        **{
            "num_hidden_layers": 6,
            "layer_types": kinds,
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "eos_token_id": None,
            **changes,
        },
    )


def gpt_oss(**changes: Any) -> PreTrainedConfig:
    """Sliding and full layers in turn, each with a learned logit that takes part in the softmax."""
    return _config(
        transformers.GptOssConfig,
        **{
            "num_hidden_layers": 6,
            "sliding_window": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **changes,
        },
    )


#: Every architecture whose generate must not change when all layers are full.
ARCHITECTURES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "mistral_sliding": mistral_sliding,
    "qwen2": qwen2,
    "qwen2_sliding": qwen2_sliding,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
}


def build(
    config: PreTrainedConfig, *, seed: int = 0, qk_gain: float = 1.6, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model of ``config`` in ``dtype`` with unit-gain random weights, ready for inference.

    Its attention is sdpa, or eager where transformers has no sdpa (GPT-OSS, Gemma2).
    """
    attention = "eager" if config.model_type in ("gpt_oss", "gemma2") else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    return randomize(model, seed=seed, qk_gain=qk_gain)


def randomize(model: PreTrainedModel, *, seed: int = 0, qk_gain: float = 1.6) -> PreTrainedModel:
    """Gives ``model`` random weights of unit gain."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name:
                value = noise
            elif parameter.ndim >= 2:
                # Experts are stored [E, in, out] or [E, out, in]: the gain need not be exact there.
                gain = qk_gain if "q_proj" in name or "k_proj" in name else 1.0
                value = noise * gain / parameter.shape[-1] ** 0.5
            elif "sinks" in name:
                value = noise
            elif "norm" in name:
                value = parameter.float() + 0.1 * noise
            else:
                value = 0.1 * noise
            parameter.copy_(value)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model


def prompt(length: int, *, seed: int) -> list[int]:
    """``length`` token ids, none of them the padding token, with repeats so that there is something to attend to."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB // 2, (length,), generator=generator).tolist()


def left_pad(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``attention_mask``, int64 ``[B, longest]``, with the padding on the left."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(prompts):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    return ids, mask
