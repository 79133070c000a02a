"""The merge of attention states."""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import call


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two attention states over disjoint keys into the state of their union, exactly.

    Args:
        out_a, out_b: ``[B, S, H, D]``, fp16, bf16 or (CPU) fp32, both of one dtype.
        lse_a, lse_b: ``[B, H, S]``, fp32, natural log; ``-inf`` marks a state without keys.

    Returns:
        ``out [B, S, H, D]`` in the inputs' dtype and ``lse [B, H, S]`` in fp32. Merging with a state without keys
        returns the other one bit for bit.

    Raises:
        ValueError: shapes, devices or strides that do not fit.
        TypeError: dtypes that do not fit.

    Example:
        >>> import torch
        >>> from lighttransfer.ops import merge_states
        >>> out, lse = torch.ones(1, 2, 4, 8), torch.zeros(1, 4, 2)
        >>> merged, merged_lse = merge_states(out, lse, 3 * out, lse)
        >>> merged[0, 0, 0, 0].item(), round(merged_lse[0, 0, 0].item(), 4)
        (2.0, 0.6931)
    """
    result: tuple[Tensor, Tensor] = call("merge_states", out_a, lse_a, out_b, lse_b)
    return result


@torch.library.register_fake("lighttransfer::merge_states")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(out_a, memory_format=torch.contiguous_format),
        torch.empty_like(lse_a, memory_format=torch.contiguous_format),
    )
