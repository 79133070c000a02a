"""What does not fit is refused: the error names the reason, and the model stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_models
import torch
import transformers
from hybrid_runs import N_LAST, WINDOW
from stepped_requests import LONG, Request
from transformers import PreTrainedConfig, PreTrainedModel

import lighttransfer
from lighttransfer.cache import LightTransferCache

SETTINGS = {**WINDOW, "n_last": N_LAST}
PROMPT = tiny_models.prompt(47, seed=0)


def enabled() -> PreTrainedModel:
    model = tiny_models.build(tiny_models.llama())
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    return model


def _tiny(cls: type[PreTrainedConfig], **changes: object) -> PreTrainedModel:
    config = cls(
        **{
            "vocab_size": tiny_models.VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            **changes,
        }
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def gemma2() -> PreTrainedModel:
    return _tiny(transformers.Gemma2Config, head_dim=16, attn_logit_softcapping=50.0)


def deepseek() -> PreTrainedModel:
    return _tiny(
        transformers.DeepseekV3Config,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
    )


def gemma3n() -> PreTrainedModel:
    config = transformers.Gemma3nTextConfig(
        vocab_size=tiny_models.VOCAB,
        vocab_size_per_layer_input=tiny_models.VOCAB,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
        pad_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def qwen3_next() -> PreTrainedModel:
    return _tiny(
        transformers.Qwen3NextConfig,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def llama4() -> PreTrainedModel:
    return _tiny(
        transformers.Llama4TextConfig,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"] * 2,
    )


def t5() -> PreTrainedModel:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=tiny_models.VOCAB, **sizes))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (gemma2, "attention scores must not be capped"),
        (deepseek, "one head_dim.*multi-head latent attention"),
        (gemma3n, "keys and values of its own"),
        (qwen3_next, "full or sliding-window attention.*linear_attention"),
        (llama4, "full or sliding-window attention.*chunked_attention"),
        (t5, "must be decoder-only"),
    ],
)
def test_models_that_do_not_fit_are_refused_with_the_reason(build: Callable[[], PreTrainedModel], reason: str) -> None:
    model = build()
    attention = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        lighttransfer.enable(model, **SETTINGS)
    assert model.config._attn_implementation == attention, "a refused model must be as it was"
    assert not hasattr(model.config, "lighttransfer")


@pytest.mark.parametrize("implementation", ["static", "offloaded", "offloaded_static", "quantized"])
def test_other_cache_implementations_are_refused(implementation: str) -> None:
    model = enabled()
    with pytest.raises(ValueError, match=implementation):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=4, cache_implementation=implementation)


def test_output_attentions_is_refused() -> None:
    model = enabled()
    ids = torch.tensor([PROMPT])
    with pytest.raises((ValueError, NotImplementedError), match="output_attentions"):
        model.generate(ids, max_new_tokens=4, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises((ValueError, NotImplementedError), match="output_attentions"), torch.no_grad():
        model(input_ids=ids, past_key_values=LightTransferCache(model.config), output_attentions=True)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"full_layers": 1.5}, "full_layers"),
        ({"full_layers": -1}, "full_layers"),
        ({"full_layers": 6}, "full_layers"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_recent": 0}, "n_recent"),
        ({"n_last": 0}, "n_last"),
        ({"policy": "lazyratio"}, "lazyratio"),
    ],
)
def test_bad_settings_name_the_argument_and_leave_the_model_alone(settings: dict[str, object], match: str) -> None:
    model = tiny_models.build(tiny_models.llama())
    with pytest.raises(ValueError, match=match):
        lighttransfer.enable(model, **{**SETTINGS, **settings})
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "lighttransfer")


@torch.no_grad()
@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"attention_mask": torch.ones(1, 1, 1, 48)}, "attention_mask must be 2D"),
        ({"attention_mask": torch.ones(1, 30)}, r"attention_mask must be \[batch, .*\(1, 49\), got \(1, 30\)"),
        ({"input_ids": torch.tensor([[5, 6]] * 2)}, "key_states must have the cache's batch of 1, got 2"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call: dict[str, torch.Tensor], match: str) -> None:
    """The cache goes on as if they had not been made."""
    model = enabled()
    caches = [LightTransferCache(model.config) for _ in range(2)]
    for cache in caches:
        model(input_ids=torch.tensor([PROMPT]), cache=cache)
    with pytest.raises(ValueError, match=match):
        model(**{"input_ids": torch.tensor([[5, 6]]), **call}, cache=caches[0])
    after = [model(input_ids=torch.tensor([[5, 6]]), cache=cache).logits for cache in caches]
    assert torch.equal(*after)


def test_dropout_is_refused() -> None:
    model = tiny_models.build(tiny_models.llama(attention_dropout=0.5))
    lighttransfer.enable(model, full_layers=2, **SETTINGS).train()
    with pytest.raises(ValueError, match=r"dropout must be 0 with a LightTransferCache, got 0.5"):
        model(input_ids=torch.tensor([PROMPT]), cache=LightTransferCache(model.config))


def test_a_model_that_is_not_enabled_is_refused() -> None:
    model = tiny_models.build(tiny_models.llama())
    with pytest.raises(RuntimeError, match="did not attend through lighttransfer"):
        model(input_ids=torch.tensor([PROMPT]), cache=LightTransferCache(model.config, **SETTINGS))


def test_prompts_open_and_close_in_turn() -> None:
    cache = LightTransferCache(enabled().config)
    with pytest.raises(RuntimeError, match="no prompt is open"):
        cache.end_prefill()
    with pytest.raises(ValueError, match="prompt_length must be at least 1, got 0"):
        cache.begin_prefill(0)
    cache.begin_prefill(4)
    with pytest.raises(RuntimeError, match="a prompt is open already"):
        cache.begin_prefill()


def test_what_cannot_be_a_step_is_refused() -> None:
    request = Request({"full_layers": 2}, LONG)
    cache = request.cache
    empty = LightTransferCache(request.model.config)
    for call in (empty.decode_step().__enter__, lambda: empty.reserve(3)):
        with pytest.raises(RuntimeError, match="has read its prompt"):
            call()
    with pytest.raises(ValueError, match="n_tokens must be at least 0, got -1"):
        cache.reserve(-1)
    with pytest.raises(TypeError, match="n_tokens must be an int"):
        cache.reserve(2.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must bring one token per row, got 2"), cache.decode_step():
        request.model(input_ids=torch.ones(3, 2, dtype=torch.int64), cache=cache)
    request = Request({"full_layers": 2}, LONG)
    with request.cache.decode_step(), pytest.raises(RuntimeError, match="inside decode_step"):
        request.cache.reserve(1)
    request = Request({"full_layers": 2}, LONG)
    request.cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="recorded"):
        request.cache.reserve(1)
    request = Request({"full_layers": 2}, LONG)
    request.cache.begin_prefill(4)
    with pytest.raises(RuntimeError, match="has read its prompt"), request.cache.decode_step():
        pass
