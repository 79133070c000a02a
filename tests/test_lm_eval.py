"""(slow) lm-evaluation-harness on an enabled model: one of its synthetic tasks, which need no download of data."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lighttransfer
from lighttransfer.cache import LightTransferCache
from lighttransfer.cli.models import ModelError, load_smollm2
from lighttransfer.integration import generate_hooks

TASK, LENGTH, N_PROMPTS = "niah_single_1", 4096, 3


def missing() -> str:
    """What the test lacks, in a sentence; empty: nothing."""
    for package in ("lm_eval", "wonderwords", "nltk"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is missing: pip install -r requirements/eval.txt"
    return ""


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, list[str]]:
    """The score of the task's first prompts, and the answers."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    result: dict[str, Any] = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1),
        tasks=[TASK],
        limit=N_PROMPTS,
        gen_kwargs={"max_gen_toks": 24},
        metadata={"tokenizer": tokenizer.name_or_path, "max_seq_lengths": [LENGTH]},
        bootstrap_iters=0,
    )
    answers = [sample["filtered_resps"][0] for sample in result["samples"][TASK]]
    return result["results"][TASK][f"{LENGTH},none"], answers


@pytest.mark.slow
def test_a_synthetic_task_scores_an_enabled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    try:
        model, tokenizer = load_smollm2()
    except ModelError as error:
        pytest.skip(str(error))
    import nltk

    # The task's module asks for a sentence splitter that only other tasks of the family use.
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: False)
    caches: list[LightTransferCache] = []

    class RememberedCache(LightTransferCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            caches.append(self)

    monkeypatch.setattr(generate_hooks, "LightTransferCache", RememberedCache)
    transformers_own = evaluate(model, tokenizer)
    assert not caches

    lighttransfer.enable(model, full_layers=1.0)
    caches.clear()
    assert evaluate(model, tokenizer) == transformers_own
    assert [cache.report().requests[0].streaming_layers for cache in caches] == [[]] * N_PROMPTS

    lighttransfer.enable(model, full_layers=15, policy="nonsink_peak")
    caches.clear()
    score, answers = evaluate(model, tokenizer)
    assert [len(cache.report().requests[0].streaming_layers) for cache in caches] == [15] * N_PROMPTS
    print(f"{TASK}, {LENGTH} tokens, {N_PROMPTS} prompts: all layers {transformers_own[0]:.2f}, 15 of 30 {score:.2f}")
    print(answers)
    assert score == transformers_own[0] == 1, "what the streaming layers dropped is in the 15 full ones"
