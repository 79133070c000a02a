"""streaming_decode: empty sizes, arguments that do not fit, and what a tracer sees."""

from __future__ import annotations

import math

import pytest
import torch
from decode_cases import inputs, int32, valid

from lighttransfer.ops import streaming_decode


@pytest.mark.parametrize("shape", [(0, 4, 2, 32), (2, 0, 0, 32)])
def test_empty_dimensions(device, shape):
    batch, n_heads, n_kv_heads, head_dim = shape
    q, k, v = (x.to(device) for x in inputs(batch, n_heads, n_kv_heads, head_dim, torch.float16))
    cache = torch.zeros(2, batch, 5, n_kv_heads, head_dim, dtype=torch.float16, device=device)
    n = int32([0] * batch, device)
    out, lse, mass = streaming_decode(q, k, v, *cache, n, n_sink=1, n_recent=n, mass_n_recent=1)
    assert out.shape == q.shape
    assert lse.shape == (batch, n_heads, 1)
    assert mass.shape == (batch, n_heads, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: {"q": a["q"][0]}, ValueError, r"q must have shape \[B, 1, H_q, D\]"),
        (lambda a: {"q": a["q"][:, :, :3]}, ValueError, "q must have a number of heads .* got 3 heads over 2 KV heads"),
        (
            lambda a: {"q": a["q"].float()},
            TypeError,
            "(k must have dtype Float, got Half|q must have .* on a GPU, got Float)",
        ),
        (lambda a: {"q": a["q"].int()}, TypeError, "q must have dtype"),
        (lambda a: {"q": None}, TypeError, "q must be a tensor, got None"),
        (lambda a: {"k": a["k"][:2]}, ValueError, "k must have shape"),
        (lambda a: {"v": a["v"][..., :8]}, ValueError, "v must have shape"),
        (lambda a: {"v": a["v"].bfloat16()}, TypeError, "v must have dtype Half, got BFloat16"),
        (lambda a: {"k_cache": a["k_cache"].float()}, TypeError, "k_cache must have dtype Half, got Float"),
        (lambda a: {"v_cache": a["v_cache"].float()}, TypeError, "v_cache must have dtype Half, got Float"),
        (lambda a: {"v_cache": a["v_cache"][:-1]}, ValueError, "v_cache must have shape"),
        (lambda a: {"v_cache": a["k_cache"]}, ValueError, "v_cache must not be the memory of k_cache"),
        (lambda a: {"seq_len": a["seq_len"].long()}, TypeError, "seq_len must have dtype Int, got Long"),
        (lambda a: {"seq_len": a["seq_len"][:2]}, ValueError, r"seq_len must have shape \[B\] = \[3\], got \[2\]"),
        (lambda a: {"n_recent": a["n_recent"].float()}, TypeError, "n_recent must have dtype Int, got Float"),
        (lambda a: {"n_sink": -1}, ValueError, r"n_sink must lie in \[0, 2147483647\], got -1"),
        (lambda a: {"mass_n_recent": -2}, ValueError, r"mass_n_recent must lie in \[-1, 2147483647\], got -2"),
        (lambda a: {"block_table": a["block_table"][:2]}, ValueError, "block_table must have shape"),
        (lambda a: {"block_table": a["block_table"].long()}, TypeError, "block_table must have dtype Int"),
        (lambda a: {"scale": "2"}, TypeError, "scale"),
        (lambda a: {"scale": 0.0}, ValueError, "scale must be a positive finite number, got 0"),
        (lambda a: {"scale": -0.5}, ValueError, "scale must be a positive finite number, got -0.5"),
        (lambda a: {"scale": math.nan}, ValueError, "scale must be a positive finite number, got nan"),
        (lambda a: {n: a[n][..., :12] for n in ("q", "k", "v", "k_cache", "v_cache")}, ValueError, "q must .* 12"),
    ],
)
def test_errors_name_argument_rule_and_value(device, change, error, message):
    args = valid(device)
    before = args["k_cache"].clone(), args["v_cache"].clone()
    with pytest.raises(error, match=message):
        streaming_decode(**(args | change(args)))
    assert torch.equal(args["k_cache"], before[0])
    assert torch.equal(args["v_cache"], before[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"seq_len": [5, 9, 2**31 - 1], "n_recent": [0, 8, 0]},
            "of 40 slots, got a need for 2147483648 in row 2",
        ),
        ({"n_recent": [0, 8, 39], "seq_len": [5, 9, 40]}, "seq_len must .* a need for 41 in row 2"),
        ({"n_recent": [0, 8, -1]}, r"n_recent must lie in \[0, 2147483647\] in every row, got -1 in row 2"),
        ({"n_recent": [0, 8, 0], "seq_len": [5, 9, 33]}, r"block_table must hold page ids .* got -7 at \[2, 4\]"),
        ({"page": 15}, r"block_table must hold page ids in \[0, 15\) .* got 15 at \[2, 0\]"),
    ],
)
def test_a_bad_row_leaves_every_buffer_as_it_was(device, change, message):
    if device != "cpu":
        pytest.skip("a GPU's rows are checked by the kernel")
    args = valid(device)
    args |= {n: int32(values, device) for n, values in change.items() if n != "page"}
    if "page" in change:
        args["block_table"][2, 0] = change["page"]
    before = args["k_cache"].clone(), args["v_cache"].clone()
    with pytest.raises(ValueError, match=message):
        streaming_decode(**args)
    assert torch.equal(args["k_cache"], before[0])
    assert torch.equal(args["v_cache"], before[1])


@pytest.mark.parametrize("mass_n_recent", [-1, 4])
@pytest.mark.parametrize("paged", [False, True])
def test_opcheck(device, mass_n_recent, paged):
    args = valid(device) | {"mass_n_recent": mass_n_recent}
    if not paged:
        args["block_table"] = None
        args["k_cache"], args["v_cache"] = torch.zeros(2, 3, 40, 2, 16, dtype=torch.float16, device=device)
    positional = [args.pop(n) for n in ("q", "k", "v", "k_cache", "v_cache", "seq_len")]
    torch.library.opcheck(torch.ops.lighttransfer.streaming_decode.default, tuple(positional), args)


def test_compiles_without_a_graph_break(device):
    args = valid(device) | {"mass_n_recent": 4}

    def step(x, **kwargs):
        out, lse, mass = streaming_decode(x * 2, **kwargs)
        return out + 1, lse, mass

    q = args.pop("q")
    eager = {n: a.clone() if n.endswith("cache") else a for n, a in args.items()}
    want = step(q, **eager)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, **args)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(args["k_cache"], eager["k_cache"])
    assert torch.equal(args["v_cache"], eager["v_cache"])
