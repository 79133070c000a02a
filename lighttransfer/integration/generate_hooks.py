"""The methods of an enabled model that ``generate`` calls: each does the cache's part around the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from ..cache import LightTransferCache
from .generate_wrappers import RowsThatFinish, TimelyDrafts
from .placement import layer_devices, tensor_parallel_group

#: The names under which ``generate`` holds its cache in model_kwargs.
_CACHE_NAMES = ("cache", "past_key_values")
#: The attribute that remembers what :func:`~lighttransfer.enable` replaced.
BEFORE = "_lighttransfer_before"
#: The attribute under which a call's generation_config carries :class:`RowsThatFinish` to the prefill.
_CRITERIA = "_lighttransfer_criteria"


def _original(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    """The method that a hook stands in for."""
    method = getattr(model, BEFORE)["methods"][name]
    if method is not None:
        return method  # type: ignore[no-any-return]
    return MethodType(getattr(type(model), name), model)


def _prepare_cache_for_generation(
    self: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """``generate`` makes its cache here; where it would take a DynamicCache it gets ours."""
    implementation = generation_config.cache_implementation
    if implementation not in (None, "dynamic"):
        raise ValueError(
            "cache_implementation must be None or 'dynamic' on a model enabled for lighttransfer, got "
            f"{implementation!r}: lighttransfer.disable(model) comes first"
        )
    mode = kwargs.get("generation_mode", args[0] if args else None)
    compiles = (
        generation_config.compile_config is not None
        and not generation_config.disable_compile
        and mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    )
    own = {name: model_kwargs.get(name) for name in _CACHE_NAMES}
    result = _original(self, "_prepare_cache_for_generation")(generation_config, model_kwargs, *args, **kwargs)
    if generation_config.is_assistant:  # drafts are taken back beyond the prompt, further than a cut layer remembers
        return result
    max_length = kwargs.get("max_cache_length", args[2] if len(args) > 2 else None)
    for name in _CACHE_NAMES:
        if own[name] is None and type(model_kwargs.get(name)) is DynamicCache:
            model_kwargs[name] = LightTransferCache(
                self.config,
                max_length=max_length,
                process_group=tensor_parallel_group(self),
                devices=layer_devices(self),
            )
    cache = _cache_in(model_kwargs)
    if cache is not None:
        cache.compile_for(max_length if compiles else None)
    return result


def _cache_in(kwargs: dict[str, Any]) -> LightTransferCache | None:
    """Our cache among a call's arguments."""
    caches = (kwargs.get(name) for name in _CACHE_NAMES)
    return next((cache for cache in caches if isinstance(cache, LightTransferCache)), None)


def _prepare_inputs_for_generation(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    next_sequence_length: int | None = None,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    is_first_iteration: bool | None = False,
    **kwargs: Any,
) -> Any:
    """``generate`` prepares each forward here: before a decode step the cache does the host's part of it, so that the
    forward can be compiled in one graph. The parameters are transformers' own, which ``generate`` inspects."""
    inputs = _original(self, "prepare_inputs_for_generation")(
        input_ids,
        next_sequence_length=next_sequence_length,
        cache=cache,
        attention_mask=attention_mask,
        inputs_embeds=inputs_embeds,
        is_first_iteration=is_first_iteration,
        **kwargs,
    )
    ours = _cache_in(inputs)
    if ours is None:
        return inputs
    if ours.decoding.is_open:  # a loop of the user's own, which does not tell when a step is done
        ours.decoding.close()
    tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
    if tokens is not None and tokens.shape[1] == 1 and ours.decoding.can_step():
        ours.decoding.open()
        if ours.is_compileable:
            inputs.pop("attention_mask", None)  # its shape changes with every step, and no decode step needs it
    return inputs


def _update_model_kwargs_for_generation(
    self: PreTrainedModel, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """``generate`` comes here after each forward: a decode step is done."""
    cache = _cache_in(model_kwargs)
    if cache is not None and cache.decoding.is_open:
        cache.decoding.close()
    return _original(self, "_update_model_kwargs_for_generation")(outputs, model_kwargs, *args, **kwargs)


def _prefill(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``generate`` reads the prompt here; one that it will read in chunks is announced to the cache."""
    cache = _cache_in(model_kwargs)
    if cache is not None:
        cache.stop_recording()  # tokens of an earlier assisted call are final
        criteria = getattr(generation_config, _CRITERIA, None)
        if criteria is not None:
            criteria.cache = cache
    if cache is None or generation_config.prefill_chunk_size is None:
        return _original(self, "_prefill")(input_ids, generation_config, model_kwargs, *args, **kwargs)
    mask = model_kwargs.get("attention_mask")
    columns = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", None)
    cache.begin_prefill(None if columns is None else columns - cache.get_seq_length())
    if cache.is_compileable:  # transformers would compile the chunks, too: scores and choices are the host's business
        generation_config = copy.copy(generation_config)
        generation_config.disable_compile = True
    outputs = _original(self, "_prefill")(input_ids, generation_config, model_kwargs, *args, **kwargs)
    if cache.prefill_is_open:
        cache.end_prefill()
    return outputs


def _get_stopping_criteria(self: PreTrainedModel, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    criteria = _original(self, "_get_stopping_criteria")(generation_config, *args, **kwargs)
    # Rows of a beam search are exchanged, and without an end token every row goes on to sample tokens.
    if (generation_config.num_beams or 1) > 1 or not any(hasattr(each, "eos_token_id") for each in criteria):
        return criteria
    criteria = RowsThatFinish(criteria)
    setattr(generation_config, _CRITERIA, criteria)  # this call's own copy, which _prefill gets too
    return criteria


def _get_candidate_generator(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    generator = _original(self, "_get_candidate_generator")(*args, **kwargs)
    model_kwargs = kwargs.get("model_kwargs") or {}
    return TimelyDrafts(generator, next((model_kwargs[n] for n in _CACHE_NAMES if n in model_kwargs), None))


#: What replaces the methods of an enabled model.
HOOKS: dict[str, Callable[..., Any]] = {
    "_prepare_cache_for_generation": _prepare_cache_for_generation,
    "prepare_inputs_for_generation": _prepare_inputs_for_generation,
    "_update_model_kwargs_for_generation": _update_model_kwargs_for_generation,
    "_prefill": _prefill,
    "_get_stopping_criteria": _get_stopping_criteria,
    "_get_candidate_generator": _get_candidate_generator,
}
