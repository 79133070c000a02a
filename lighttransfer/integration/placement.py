"""Where a model's parts are: the devices of its layers, the ranks that share its heads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def tensor_parallel_group(model: PreTrainedModel) -> Any:
    """The process group over which transformers has split the heads; ``None``: they are not split."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None or getattr(model, "_tp_size", None) in (None, 1):
        return None
    return (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()


def layer_devices(model: PreTrainedModel) -> list[torch.device] | None:
    """The device on which each attention layer runs; ``None``: not every layer says so."""
    devices: dict[int, torch.device] = {}
    for module in model.get_decoder().modules():
        weight = next(module.parameters(), None)
        index = getattr(module, "layer_idx", None)
        if weight is None or not isinstance(index, int):
            continue
        devices[index] = weight.device
        if weight.is_meta:  # offloaded: accelerate brings the weights to where the layer runs
            hook = next((m._hf_hook for m in module.modules() if hasattr(m, "_hf_hook")), None)
            execution_device = getattr(hook, "execution_device", None)
            devices[index] = weight.device if execution_device is None else torch.device(execution_device)
    n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return [devices[index] for index in range(n_layers)] if len(devices) == n_layers else None
