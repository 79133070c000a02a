"""``model.generate`` on an enabled model: against transformers' own cache, and against the reference model."""

from __future__ import annotations

import hybrid_runs as runs
import pytest
import tiny_models
import torch
from hybrid_runs import N_LAST, WINDOW, WINDOW_SIZE, References, cuts_after_prefill, streaming

import lighttransfer
from lighttransfer.cache import LightTransferCache

SETTINGS = {**WINDOW, "n_last": N_LAST}
PROMPTS = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate((47, 30, 39))]
#: Steps that make every key of the prompt's recent window leave the ring three times over.
LONG = 3 * WINDOW_SIZE + 2

COMPETING = [name for name in tiny_models.ARCHITECTURES if name != "mistral_sliding"]


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_all_layers_full_gives_transformers_tokens(name: str) -> None:
    model = tiny_models.build(tiny_models.ARCHITECTURES[name]())
    ids, mask = tiny_models.left_pad(PROMPTS)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    alone = model.generate(ids[:1], max_new_tokens=30, do_sample=False)

    lighttransfer.enable(model, full_layers=1.0, **SETTINGS)
    run = runs.generate(model, PROMPTS, 30)
    assert isinstance(run.cache, LightTransferCache)
    assert all(not layers for layers in streaming(run.cache))
    for row, answer in enumerate(run.answers):
        assert answer == expected[row, ids.shape[1] :].tolist(), f"row {row}"
    assert torch.equal(model.generate(ids[:1], max_new_tokens=30, do_sample=False), alone)


@pytest.mark.parametrize("name", COMPETING)
def test_decode_logits_equal_the_masked_reference(name: str) -> None:
    model = tiny_models.build(tiny_models.ARCHITECTURES[name]())
    references = References(model)
    lighttransfer.enable(model, full_layers=0.5, **SETTINGS)
    run = runs.generate(model, PROMPTS, LONG)
    assert all(streaming(run.cache)), "a row without a streaming layer tests nothing"
    references.check(run, cuts_after_prefill(run))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_decode_logits_for_other_head_groups(heads: int, kv_heads: int) -> None:
    sizes = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 24}
    config = tiny_models.llama(**sizes)
    model = tiny_models.build(config)
    references = References(model)
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    run = runs.generate(model, PROMPTS, LONG)
    references.check(run, cuts_after_prefill(run))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_logits_in_half_precision(dtype: torch.dtype) -> None:
    model = tiny_models.build(tiny_models.llama(), dtype=dtype)
    references = References(model)
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    run = runs.generate(model, PROMPTS, LONG)
    references.check(run, cuts_after_prefill(run))


@pytest.mark.parametrize("rule", ["lazy_ratio", "nonsink_peak", "output_error"])
def test_each_request_keeps_the_layers_that_the_rule_names(rule: str) -> None:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    # Every last query sees every kept key of output_error's small attention call only if the window holds them all.
    n_last = WINDOW["n_recent"] if rule == "output_error" else N_LAST
    expected = [references.choice(prompt, rule=rule, n_full=2, n_last=n_last) for prompt in PROMPTS]
    assert len({choice.streaming for choice in expected}) > 1, "the rows must differ to test anything"

    lighttransfer.enable(model, full_layers=2, policy=rule, n_last=n_last, **WINDOW)
    run = runs.generate(model, PROMPTS, 2)
    for row, choice in enumerate(expected):
        runs.assert_chosen(run.cache, row, choice)


def test_a_row_of_a_batch_equals_the_row_alone() -> None:
    prompts = [*PROMPTS, tiny_models.prompt(5, seed=9), tiny_models.prompt(9, seed=10)]
    model = tiny_models.build(tiny_models.llama())
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    batch = runs.generate(model, prompts, LONG)
    assert len(set(streaming(batch.cache))) > 1, "the rows must differ to test anything"
    for row, prompt in enumerate(prompts):
        alone = runs.generate(model, [prompt], LONG)
        assert batch.answers[row] == alone.answers[0]
        assert streaming(batch.cache)[row] == streaming(alone.cache)[0]
        assert (batch.logits[row] - alone.logits[0]).abs().max() < 2e-5


def test_prefill_logits_are_the_full_models() -> None:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, full_layers=1.0, **SETTINGS)
    full = runs.generate(model, PROMPTS, 1)
    lighttransfer.disable(model)
    lighttransfer.enable(model, full_layers=1, **SETTINGS)
    cut = runs.generate(model, PROMPTS, 1)
    assert all(len(layers) == 4 for layers in streaming(cut.cache))
    assert torch.equal(full.logits, cut.logits)
    references.check(cut, [{}, {}, {}])


@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "gemma3", "gpt_oss"])
def test_a_static_list_may_stream_the_first_or_the_last_layer(name: str, at: int) -> None:
    """The first or last of those that compete, where some have a native window."""
    model = tiny_models.build(tiny_models.ARCHITECTURES[name]())
    references = References(model)
    competing = LightTransferCache(model.config).report().competing_layers
    layer = competing[at]
    if name in ("llama", "mixtral", "qwen2_moe", "qwen3_moe"):
        assert layer == (0, 4)[at]
    keep = [i for i in competing if i != layer]
    lighttransfer.enable(model, policy=lighttransfer.selection.StaticLayers(keep), **SETTINGS)
    run = runs.generate(model, PROMPTS, LONG)
    assert streaming(run.cache) == [frozenset({layer})] * 3
    references.check(run, cuts_after_prefill(run))


def test_a_prompt_inside_the_window_is_the_full_model() -> None:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    prompts = [tiny_models.prompt(length, seed=length) for length in (WINDOW_SIZE, 3, 1)]
    run = runs.generate(model, prompts, WINDOW_SIZE)  # the longest ends at twice the window
    assert streaming(run.cache) == [frozenset()] * 3
    references.check(run, [{}, {}, {}])


def test_n_last_larger_than_the_prompt_uses_the_queries_there_are() -> None:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    prompt = tiny_models.prompt(14, seed=4)
    expected = references.choice(prompt, rule="lazy_ratio", n_full=2, n_last=32)
    lighttransfer.enable(model, full_layers=2, **WINDOW, n_last=32)
    run = runs.generate(model, [tiny_models.prompt(40, seed=5), prompt], 2)
    runs.assert_chosen(run.cache, 1, expected)


def test_a_window_without_sinks() -> None:
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, full_layers=2, n_sink=0, n_recent=8, n_last=N_LAST)
    run = runs.generate(model, PROMPTS, LONG)
    references.check(run, cuts_after_prefill(run), window={"n_sink": 0, "n_recent": 8})


def test_padding_is_not_a_sink() -> None:
    """The sinks of a padded row are its first real tokens: a cut that counted from the padding would lose them."""
    model = tiny_models.build(tiny_models.llama())
    references = References(model)
    lighttransfer.enable(model, full_layers=1, n_sink=4, n_recent=4, n_last=N_LAST)
    run = runs.generate(model, [tiny_models.prompt(60, seed=1), tiny_models.prompt(12, seed=2)], LONG)
    references.check(run, cuts_after_prefill(run), window={"n_sink": 4, "n_recent": 4})


def test_requests_finish_at_different_times() -> None:
    model = tiny_models.build(tiny_models.llama())
    lighttransfer.enable(model, full_layers=2, **SETTINGS)
    free = runs.generate(model, PROMPTS, 20)
    stop = free.answers[1][4]
    expected = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in free.answers]
    assert len({len(answer) for answer in expected}) > 1
    ids, mask = tiny_models.left_pad(PROMPTS)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=stop)
    for row, answer in enumerate(expected):
        assert out[row, ids.shape[1] :].tolist()[: len(answer)] == answer
