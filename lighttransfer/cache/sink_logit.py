"""A learned logit per head that takes part in the softmax and has no value (GPT-OSS), applied after the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_logit_weight(lse: Tensor, sink_logit: Tensor) -> Tensor:
    """What softmax leaves to the keys of ``lse [B, H, S]`` beside a learned logit ``[H]``: fp32 ``[B, H, S]``."""
    return torch.sigmoid(lse - sink_logit.float()[:, None])


def apply_sink_logit(out: Tensor, lse: Tensor, sink_logit: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with a learned logit per head that takes part in the softmax and has no value (GPT-OSS).

    The logit only scales what softmax over the keys gives, by :func:`sink_logit_weight`; so kernels need not know it.

    Args:
        out: ``[B, S, H, D]``; lse: ``[B, H, S]`` of the keys alone; sink_logit: ``[H]``.

    Returns:
        The scaled output in ``out``'s dtype, and ``w [B, H, S]`` in fp32.
    """
    weight = sink_logit_weight(lse, sink_logit)
    return (out * weight.transpose(1, 2)[..., None]).to(out.dtype), weight


def sink_logit_mass(mass: Tensor, weight: Tensor) -> Tensor:
    """``mass [B, H, n, 2]`` of the keys alone with a learned sink logit of weight ``1 - w``, ``w [B, H, n]``.

    The logit is a sink that is never evicted, so what rests on it counts as resting on the sinks.
    """
    scaled = mass * weight[..., None]
    return torch.stack((scaled[..., 0] + (1 - weight), scaled[..., 1]), dim=-1)
