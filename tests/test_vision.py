"""Vision-language models: image tokens under a plain causal mask stream like any others; other masks are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import reference_model as ref
import tiny_models
import torch
import transformers
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, streaming
from test_integration import llava
from transformers import PreTrainedModel

import lighttransfer

SETTINGS = {**WINDOW, "n_last": N_LAST}
TEXT = tiny_models.prompt(20, seed=0), tiny_models.prompt(23, seed=1)
IMAGE = 96  # the token that stands for a patch
STEPS = 3 * WINDOW_SIZE
SIZES = {**tiny_models._COMMON, "tie_word_embeddings": False}


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def llava_inputs() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    ids = torch.tensor([[*TEXT[0], *[IMAGE] * 4, *TEXT[1]]])
    return llava(), {"input_ids": ids, "pixel_values": pixels(1, 3, 16, 16)}


def qwen2_vl() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Positions of image tokens have three coordinates, and the text behind them goes on at the largest."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tokens = {"image_token_id": IMAGE, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
    config = transformers.Qwen2VLConfig(text_config={**SIZES, "rope_parameters": rope}, vision_config=vision, **tokens)
    model = transformers.Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    ids = torch.tensor([[*TEXT[0], 94, *[IMAGE] * 4, 93, *TEXT[1]]])
    inputs = {"pixel_values": pixels(16, 3 * 2 * 16), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return tiny_models.randomize(model), {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **inputs}


class Reference(ref.ReferenceModel):
    """A copy of the whole model, whose text part attends under literal masks."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model, self.dtype = copy.deepcopy(model).to(dtype), dtype
        self.model.set_attn_implementation({"text_config": ref._NAME})

    def logits(self, inputs: dict[str, Any], row: list[int], cut_at: dict[int, int]) -> torch.Tensor:
        run = ref._Run([cut_at], **WINDOW)
        ids = torch.tensor([row])
        given = {**inputs, "input_ids": ids, "pixel_values": inputs["pixel_values"].to(self.dtype)}
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = (ids == IMAGE).int()
        logits: torch.Tensor = self._call(run, lambda: self.model(**given, use_cache=False).logits)
        return logits[0].double()


@pytest.mark.parametrize("build", [llava_inputs, qwen2_vl])
def test_image_tokens_stream_like_any_others(
    build: Callable[[], tuple[PreTrainedModel, dict[str, torch.Tensor]]],
) -> None:
    model, inputs = build()
    exact, plain = Reference(model, torch.float64), Reference(model, torch.float32)
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    assert model.config.vision_config._attn_implementation == "sdpa"
    options = {"max_new_tokens": STEPS, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(**inputs, **options)
    (cut,), length = streaming(out.cache), inputs["input_ids"].shape[1]
    assert len(cut) == 3
    row, steps = out.sequences[0].tolist(), slice(length - 1, length + STEPS - 1)
    cut_at = dict.fromkeys(cut, length)
    expected, rounded, uncut = (
        reference.logits(inputs, row, cuts)[steps]
        for reference, cuts in ((exact, cut_at), (plain, cut_at), (exact, {}))
    )
    actual = torch.stack(out.logits, 1)[0]
    ref.assert_as_close_as_plain_torch(actual, expected, rounded, what="logits")
    moved = (uncut - expected)[WINDOW_SIZE:].abs().amax(-1).median()
    assert float(moved) > 10 * float((rounded - expected).abs().max()), "the cut must matter to test anything"


def gemma3() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Image tokens see each other whatever their order."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )
    tokens = {"mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 94, "eoi_token_index": 95}
    config = transformers.Gemma3Config(text_config=tiny_models.gemma3(), vision_config=vision, **tokens)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = tiny_models.PAD, None
    ids = torch.tensor([[*TEXT[0], 94, *[IMAGE] * 4, 95, *TEXT[1]]])
    return model, {"input_ids": ids, "pixel_values": pixels(1, 3, 16, 16), "token_type_ids": (ids == IMAGE).long()}


def test_images_whose_tokens_see_each_other_are_refused() -> None:
    """The text alone streams, before and after."""
    model, inputs = gemma3()
    options = {"max_new_tokens": 12, "do_sample": False}
    text = {"input_ids": torch.tensor([[*TEXT[0], *TEXT[1]]])}
    with_images = model.generate(**inputs, **options)
    lighttransfer.enable(model, full_layers=1, **SETTINGS)
    expected = model.generate(**text, **options)
    cache = lighttransfer.LightTransferCache(model.config)
    with pytest.raises(ValueError, match=r"attention_mask must be a padding mask.*bidirectional blocks \(images\)"):
        model.generate(**inputs, **options, cache=cache)
    assert cache.get_seq_length() == 0
    assert cache.lengths == []
    assert torch.equal(model.generate(**text, **options, cache=cache), expected)
    assert torch.equal(lighttransfer.disable(model).generate(**inputs, **options), with_images)


def test_a_model_whose_prompts_are_bidirectional_is_refused() -> None:
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = transformers.GemmaConfig(**SIZES)
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    model = transformers.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="attention must be causal, got a bidirectional model"):
        lighttransfer.enable(model, full_layers=2, **SETTINGS)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "lighttransfer")
