"""What retained_mass and lazy_ratio say about arguments that do not fit."""

from __future__ import annotations

import pytest
import torch

from lighttransfer.ops import lazy_ratio, retained_mass

ERRORS = [
    ("q_last", lambda t: t.long(), TypeError, "q_last must have dtype Half.* BFloat16.*, got Long"),
    ("q_last", lambda t: t[0], ValueError, r"q_last must have shape \[B, S_q, H_q, D\]"),
    ("q_last", lambda t: t[..., :20], ValueError, "head_dim that is a multiple of 8"),
    ("q_last", lambda t: t.mT.contiguous().mT, ValueError, "q_last must have unit stride"),
    ("k", lambda t: t.bfloat16(), TypeError, "k must have dtype Half, got BFloat16"),
    ("k", lambda t: t[:2], ValueError, "k must have shape"),
    ("k", lambda t: t.repeat(1, 1, 2, 1)[:, :, :3], ValueError, "q must have a number of heads that .* 4 heads over 3"),
    ("lse_last", lambda t: t.double(), TypeError, "lse_last must have dtype Float, got Double"),
    ("lse_last", lambda t: t[:, :, 1:], ValueError, r"lse_last must have shape \[B, H_q, S_q\] = \[3, 4, 5\]"),
    ("n_sink", lambda _: -1, ValueError, "n_sink must lie in"),
    ("n_recent", lambda _: -1, ValueError, "n_recent must lie in"),
    ("n_recent", lambda _: 2**40, ValueError, "n_recent must lie in"),
    ("scale", lambda _: 0.0, ValueError, "scale must be a positive finite number, got 0"),
    ("scale", lambda _: -0.5, ValueError, "scale must be a positive finite number, got -0.5"),
    ("scale", lambda _: 1e300, ValueError, r"scale must be a positive finite number, got 1e\+300"),
    ("seq_start", lambda t: t.long(), TypeError, "seq_start must have dtype Int, got Long"),
    ("seq_start", lambda t: t[:2], ValueError, "seq_start must have shape"),
]


@pytest.mark.parametrize(("name", "change", "kind", "text"), ERRORS)
def test_errors_name_argument_rule_and_value(device, name, change, kind, text):
    half = {"dtype": torch.float16, "device": device}
    arguments = {
        "q_last": torch.ones(3, 5, 4, 64, **half),
        "k": torch.ones(3, 80, 2, 64, **half),
        "lse_last": torch.zeros(3, 4, 5, device=device),
        "n_sink": 4,
        "n_recent": 10,
        "seq_start": torch.zeros(3, dtype=torch.int32, device=device),
    }
    arguments[name] = change(arguments.get(name))
    with pytest.raises(kind, match=text):
        retained_mass(**arguments)


def test_row_errors():
    q, k = torch.ones(3, 5, 4, 64), torch.ones(3, 80, 2, 64)
    for value in (-1, 81):
        start = torch.tensor([0, 80, value], dtype=torch.int32)
        with pytest.raises(ValueError, match=rf"seq_start must lie in \[0, 80\] in every row, got {value} in row 2"):
            retained_mass(q, k, torch.zeros(3, 4, 5), n_sink=1, n_recent=1, seq_start=start)
    for value in (-1, 6):
        with pytest.raises(ValueError, match=rf"n_queries must lie in \[0, 5\] in every row, got {value} in row 1"):
            lazy_ratio(torch.zeros(2, 4, 5, 2), n_queries=torch.tensor([5, value], dtype=torch.int32))


def test_lazy_ratio_errors(device):
    mass = torch.zeros(2, 4, 5, 2, device=device)
    with pytest.raises(TypeError, match="mass must have dtype Float, got Half"):
        lazy_ratio(mass.half())
    with pytest.raises(ValueError, match=r"mass must have shape \[B, H_q, n_last, 2\]"):
        lazy_ratio(mass[..., :1])
    with pytest.raises(ValueError, match="mass must be contiguous"):
        lazy_ratio(mass[:, :, 1:])
    with pytest.raises(ValueError, match="n_queries must have shape"):
        lazy_ratio(mass, n_queries=torch.zeros(3, dtype=torch.int32, device=device))
