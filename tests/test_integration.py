"""``enable`` and ``disable``: settings, and that no two requests, caches, models or threads share state."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import hybrid_runs as runs
import pytest
import tiny_models
import torch
import transformers
from hybrid_runs import N_LAST, WINDOW, streaming
from transformers import DynamicCache, PreTrainedModel

import lighttransfer
from lighttransfer.cache import LightTransferCache

SETTINGS = {**WINDOW, "n_last": N_LAST}
PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 39))]


def enabled(seed: int = 0, **settings: object) -> PreTrainedModel:
    model = tiny_models.build(tiny_models.llama(), seed=seed)
    lighttransfer.enable(model, **{**SETTINGS, "full_layers": 2, **settings})
    return model


def test_enable_and_disable_restore_the_model() -> None:
    model = tiny_models.build(tiny_models.llama())
    before, attributes = copy.deepcopy(model.config.to_dict()), set(vars(model))
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)

    lighttransfer.enable(model, full_layers=1, **SETTINGS)
    assert model.config._attn_implementation != "sdpa"
    assert not torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    lighttransfer.disable(model)

    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == before
    assert set(vars(model)) == attributes
    out = model.generate(ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert type(out.cache) is DynamicCache


def test_enable_twice_takes_the_last_settings_and_disable_restores_the_first_attention() -> None:
    model = tiny_models.build(tiny_models.llama())
    lighttransfer.enable(model, full_layers=1, **SETTINGS)
    lighttransfer.enable(model, full_layers=3, **SETTINGS)
    run = runs.generate(model, PROMPTS, 2)
    assert all(len(layers) == 2 for layers in streaming(run.cache))
    lighttransfer.disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_settings_survive_saving(tmp_path: Path) -> None:
    policy = {"name": "nonsink_peak", "top_queries": 3, "floor": 0.02}
    model = enabled(policy=policy, page_size=8, defer_windows=3.0)
    expected = runs.generate(model, PROMPTS, 12)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.lighttransfer == model.config.lighttransfer
    lighttransfer.enable(loaded)  # no argument: the settings of the checkpoint
    run = runs.generate(loaded, PROMPTS, 12)
    settings = run.cache.settings
    assert (settings.n_sink, settings.n_recent, settings.n_last) == (WINDOW["n_sink"], WINDOW["n_recent"], N_LAST)
    assert (settings.full_layers, settings.page_size, settings.defer_windows) == (2, 8, 3.0)
    assert settings.policy.to_dict() == policy
    assert run.answers == expected.answers
    assert streaming(run.cache) == streaming(expected.cache)


@torch.no_grad()
def test_with_another_cache_the_attention_function_is_sdpa() -> None:
    plain = tiny_models.build(tiny_models.llama())
    model = enabled(full_layers=1)
    ids, mask = tiny_models.left_pad(PROMPTS)
    caches = DynamicCache(config=plain.config), DynamicCache(config=model.config)
    step, more = torch.tensor([[5], [6], [7]]), torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
    for tokens, visible in ((ids, mask), (step, more)):
        a, b = (
            m(input_ids=tokens, attention_mask=visible, past_key_values=c, use_cache=True).logits
            for m, c in zip((plain, model), caches, strict=True)
        )
        real = visible[:, -tokens.shape[1] :].bool()
        assert torch.equal(a[real], b[real])
    assert torch.equal(
        plain(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()],
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()],
    )


def test_a_static_cache_object_works_as_with_sdpa() -> None:
    """What generate would make itself is refused; a cache that the caller brings is any other cache."""
    model = enabled(full_layers=1)
    ids = torch.tensor([PROMPTS[0]])
    expected = tiny_models.build(tiny_models.llama()).generate(ids, max_new_tokens=8, do_sample=False)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache), expected)


@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_an_explicit_cache(argument: str) -> None:
    model = enabled()
    expected = runs.generate(model, PROMPTS, 12)
    cache = LightTransferCache(model.config)
    run = runs.generate(model, PROMPTS, 12, **{argument: cache})
    assert run.cache is cache
    assert run.answers == expected.answers
    assert streaming(cache) == streaming(expected.cache)


def test_three_requests_in_a_row_share_nothing() -> None:
    model = enabled()
    fresh = [runs.generate(enabled(), [prompt], 12) for prompt in PROMPTS]
    again = [runs.generate(model, [prompt], 12) for prompt in PROMPTS]
    for a, b in zip(fresh, again, strict=True):
        assert a.answers == b.answers
        assert torch.equal(a.logits, b.logits)
        assert streaming(a.cache) == streaming(b.cache)
    assert len({id(run.cache) for run in again}) == 3


@torch.no_grad()
def test_two_caches_interleaved_on_one_model() -> None:
    model = enabled()
    alone = [runs.generate(model, [prompt], 12) for prompt in PROMPTS[:2]]
    caches = [LightTransferCache(model.config) for _ in alone]
    feeds = [
        [row[:length], *([token] for token in row[length:-1])]
        for row, length in ((run.rows[0], run.lengths[0]) for run in alone)
    ]
    for step, both in enumerate(zip(*feeds, strict=True)):
        for tokens, cache, run in zip(both, caches, alone, strict=True):
            logits = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0, -1]
            assert (logits - run.logits[0, step]).abs().max() < 2e-5
    assert [streaming(cache) for cache in caches] == [streaming(run.cache) for run in alone]


def test_two_models_with_different_settings() -> None:
    settings = [{"full_layers": 1}, {"full_layers": 3, "n_sink": 0, "n_recent": 10, "policy": "nonsink_peak"}]
    expected = []
    for seed, values in enumerate(settings):
        expected.append(runs.generate(enabled(seed, **values), PROMPTS, 12))
    models = [enabled(seed, **values) for seed, values in enumerate(settings)]
    for _ in range(2):
        for model, run in zip(models, expected, strict=True):
            assert torch.equal(runs.generate(model, PROMPTS, 12).logits, run.logits)
    lighttransfer.disable(models[0])
    assert torch.equal(runs.generate(models[1], PROMPTS, 12).logits, expected[1].logits)


def test_two_threads() -> None:
    model = enabled()
    expected = [runs.generate(model, [prompt], 16) for prompt in PROMPTS[:2]]
    failures: list[str] = []
    start = threading.Barrier(2)

    def work(index: int) -> None:
        try:
            start.wait()
            for _ in range(4):
                run = runs.generate(model, [PROMPTS[index]], 16)
                if run.answers != expected[index].answers or streaming(run.cache) != streaming(expected[index].cache):
                    failures.append(f"thread {index} saw {run.answers}")
        except Exception as error:
            failures.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer of the tiny models' vocabulary, made from nothing."""
    tokenizers = pytest.importorskip("tokenizers", reason="the pipeline test needs the tokenizers package")
    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, tiny_models.VOCAB)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>", padding_side="left"
    )


def test_text_generation_pipeline(tmp_path: Path) -> None:
    model = enabled()
    expected = runs.generate(model, PROMPTS, 10).answers
    generator = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer(tmp_path))
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in PROMPTS]
    for batch_size in (1, 3):
        outputs = generator(texts, max_new_tokens=10, do_sample=False, return_full_text=False, batch_size=batch_size)
        answers = [[int(word[1:]) for word in output[0]["generated_text"].split()] for output in outputs]
        assert answers == expected


def test_a_compiled_forward_gives_the_same_logits() -> None:
    """Dynamo and AOTAutograd trace the model around the cache; the host's work breaks the graphs."""
    model = tiny_models.build(tiny_models.llama(num_hidden_layers=2))
    lighttransfer.enable(model, full_layers=1, **SETTINGS)
    expected = runs.generate(model, PROMPTS, 4)
    torch._dynamo.reset()
    try:
        model.forward = torch.compile(model.forward, backend="aot_eager")
        run = runs.generate(model, PROMPTS, 4)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    finally:
        torch._dynamo.reset()
    assert streaming(run.cache) == streaming(expected.cache)
    assert (run.logits - expected.logits).abs().max() < 2e-5


def llava() -> PreTrainedModel:
    """A vision tower of four patches in front of the tiny Llama; token 96 stands for a patch."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=tiny_models.llama(), image_token_index=96, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    text = tiny_models.build(tiny_models.llama())
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.generation_config.pad_token_id = tiny_models.PAD
    return model


def test_only_the_text_part_of_a_vision_language_model_is_touched() -> None:
    model = llava()
    inputs = {
        "input_ids": torch.tensor([[*PROMPTS[0][:20], *[96] * 4, *PROMPTS[1]]]),
        "pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
    }
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **settings).sequences
    lighttransfer.enable(model, full_layers=1.0, **SETTINGS)
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(**inputs, **settings).sequences, expected)
    lighttransfer.disable(model)
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    out = model.generate(**inputs, **settings)
    assert len(streaming(out.cache)[0]) == 3
    assert not torch.equal(out.sequences, expected)
    lighttransfer.disable(model)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(**inputs, **settings).sequences, expected)
