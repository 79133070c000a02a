"""Turns a transformers model into a hybrid one, and back."""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..cache import LightTransferCache
from ..selection import Policy
from ..settings import Settings
from .attention import NAME
from .generate_hooks import BEFORE, HOOKS

Model = TypeVar("Model", bound=PreTrainedModel)


def enable(
    model: Model,
    full_layers: int | float | None = None,
    n_sink: int | None = None,
    n_recent: int | None = None,
    n_last: int | None = None,
    policy: str | dict[str, Any] | Policy | None = None,
    **settings: Any,
) -> Model:
    """Makes ``model`` a hybrid model: each ``generate`` call gets a :class:`~lighttransfer.cache.LightTransferCache`.

    ``generate``, pipelines and evaluation harnesses work as before, with less KV memory. Calls without a cache, or with
    another one, attend as with sdpa. Weights are not touched.

    Args:
        model: any decoder-only transformers model whose attention goes through ``AttentionInterface``.
        full_layers, n_sink, n_recent, n_last, policy, **settings: see :class:`~lighttransfer.settings.Settings`. What
            is not given is taken from ``model.config.lighttransfer``, where a saved model has it, else the default:
            0.5, 4, 1020, 32, ``"lazy_ratio"``.

    Returns:
        ``model``. Its settings stand in ``model.config.lighttransfer`` and are saved with it; a loaded model needs
        ``enable(model)`` again.

    Raises:
        ValueError: a model or a setting that does not fit, with the reason; the model is as it was.
        TypeError: a setting that does not exist, or of a wrong type.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import lighttransfer
        >>> sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_attention_heads=4)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2)).eval()
        >>> model = lighttransfer.enable(model, full_layers=0.5, n_sink=2, n_recent=6)
        >>> ids = torch.arange(30)[None]
        >>> out = model.generate(ids, max_new_tokens=3, pad_token_id=0, return_dict_in_generate=True)
        >>> len(out.past_key_values.report().requests[0].streaming_layers)
        2
        >>> lighttransfer.disable(model) is model
        True
    """
    new = Settings.of(model.config).replace(
        full_layers=full_layers, n_sink=n_sink, n_recent=n_recent, n_last=n_last, policy=policy, **settings
    )
    LightTransferCache(model.config, new)  # every refusal, before anything is changed
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"model must attend through transformers' AttentionInterface, got {type(model).__name__}, which does not"
        )
    before = getattr(model, BEFORE, None) or {
        "attn_implementation": _text_config(model)._attn_implementation,
        "methods": {name: model.__dict__.get(name) for name in HOOKS},
    }
    _set_attention(model, NAME)
    setattr(model, BEFORE, before)
    model.config.lighttransfer = new.to_dict()
    for name, hook in HOOKS.items():
        if hasattr(type(model), name):
            setattr(model, name, MethodType(hook, model))
    return model


def disable(model: Model) -> Model:
    """Undoes :func:`enable`: the model attends and caches as it did before. A model that is not enabled stays as it
    is.

    Args:
        model: the model that :func:`enable` was given.

    Returns:
        ``model``, without ``model.config.lighttransfer``.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import lighttransfer
        >>> sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_attention_heads=4)
        >>> model = lighttransfer.enable(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4)))
        >>> hasattr(lighttransfer.disable(model).config, "lighttransfer")
        False
    """
    before = getattr(model, BEFORE, None)
    if before is None:
        return model
    _set_attention(model, before["attn_implementation"])
    for name, method in before["methods"].items():
        model.__dict__.pop(name, None)
        if method is not None:
            setattr(model, name, method)
    delattr(model, BEFORE)
    del model.config.lighttransfer
    return model


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Sets the attention of the model's text part, and of nothing else (a vision tower keeps its own)."""
    text = _text_config(model)
    if text is model.config:
        model.set_attn_implementation(name)
        return
    key = next(key for key in model.config.sub_configs if getattr(model.config, key) is text)
    model.set_attn_implementation({key: name})
