"""What a 2D attention mask says of the tokens cached and of the new ones.

Padding is never cached, so a row's tokens lie without gaps whatever its columns look like. In a first prompt padding
stands on the left. A later turn of a batch may bring more: behind the last answer's token, which was not read yet, and
before a shorter row's new tokens. And a row that finished before others may have tokens at its end that were read and
turn out to be padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """The padding of a call.

    Attributes:
        starts: for each row how many of the new columns are padding.
        order: int64 ``[B, n_tokens]``: the new columns with the padding first; ``None``: so they are.
        n_void: for each row how many of its last cached tokens are padding, as it now turns out.
        n_sure: for each row how many of the last new columns are real tokens.
    """

    starts: list[int]
    order: Tensor | None
    n_void: list[int]
    n_sure: list[int]


def over_padding(n_before: int, n_columns: int, n_padding: Tensor) -> Tensor:
    """int64 ``[B, n_columns]``: the columns in the order that leaves out padding in between.

    Each row has ``n_before`` columns, then ``n_padding``, int64 ``[B]``, ones of padding, then the rest. The first ones
    move up to the rest; what that leaves open in front repeats the first column and means nothing.
    """
    column, shift = torch.arange(n_columns, device=n_padding.device)[None], n_padding[:, None]
    return torch.where(column < n_before + shift, (column - shift).clamp_min(0), column)


def read_mask(
    mask: Tensor | None, lengths: Sequence[int], n_seen: int, n_tokens: int, *, more_follows: bool = False
) -> Padding:
    """What ``mask``, ``[B, n_seen + n_tokens]``, says of rows of ``lengths`` cached tokens; ``None``: no padding.

    Raises:
        ValueError: a mask that does not cover the tokens seen and the new ones, that names other cached tokens than
            there are, or that has padding behind a row's last new token, unless ``more_follows`` of the prompt.
    """
    n_rows = len(lengths)
    if mask is None:
        return Padding([0] * n_rows, None, [0] * n_rows, [n_tokens] * n_rows)
    if tuple(mask.shape) != (n_rows, n_seen + n_tokens):
        raise ValueError(
            f"attention_mask must be [batch, tokens seen and new] = {(n_rows, n_seen + n_tokens)}, "
            f"got {tuple(mask.shape)}"
        )
    old, new = mask[:, :n_seen].bool(), mask[:, n_seen:].bool()
    column = torch.arange(n_tokens, device=mask.device)
    starts = n_tokens - new.sum(1)
    is_gapped = (new != (column >= starts[:, None])).any(1)
    n_sure = n_tokens - ((column + 1) * ~new).amax(1)
    n_old = old.sum(1)
    n_void_columns = n_seen - (torch.arange(1, n_seen + 1, device=mask.device) * old).amax(1) if n_seen else n_old
    counts = torch.stack((starts, is_gapped.long(), (is_gapped & ~new[:, -1]).long(), n_sure, n_old, n_void_columns))
    starts_, gapped, ends_padded, sure, n_real, n_last = counts.tolist()  # one wait for the device
    if any(ends_padded) and not more_follows:
        raise ValueError(
            "attention_mask must be left-padded: a row's new tokens end with a real one, got padding behind the last "
            f"real one in rows {[row for row, bad in enumerate(ends_padded) if bad]}"
        )
    n_void = [length - n for length, n in zip(lengths, n_real, strict=True)]
    bad = [row for row, n in enumerate(n_void) if not 0 <= n <= n_last[row]]
    if bad:
        raise ValueError(
            "attention_mask must name the tokens that are cached, or all of them but the last few of a row (which then "
            f"are padding), got {[n_real[row] for row in bad]} of {[lengths[row] for row in bad]} in rows {bad}"
        )
    order = torch.sort(new.to(torch.uint8), dim=1, stable=True).indices if any(gapped) else None
    return Padding(starts_, order, n_void, sure)
