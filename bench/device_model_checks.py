"""What only a GPU can tell of a whole model: decode steps in CUDA graphs, by hand and through ``generate``.

Part of bench/device_checks.py; a rehearsal on the CPU replays recorded ops in place of a graph.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STEPS = 60
LENGTHS = (40, 35)  # of the prompts: outside the window, and at no end of a page of 16
SETTINGS = {"full_layers": 2, "n_sink": 2, "n_recent": 30, "n_last": 8, "page_size": 16}


class Missing(Exception):
    """What a check needs is not on this machine; the text says what."""


def tests_path() -> None:
    """Makes the tests' helpers importable."""
    tests = str(Path(__file__).parent.parent / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)


def tiny_model(device: str) -> Any:
    """A Llama of four layers in bf16, enabled."""
    if importlib.util.find_spec("transformers") is None:
        raise Missing("needs transformers")
    tests_path()
    import tiny_models

    import lighttransfer

    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "head_dim": 64}
    model = tiny_models.build(tiny_models.llama(**sizes), dtype=torch.bfloat16).to(device)
    return lighttransfer.enable(model, **SETTINGS)


def request(model: Any, device: str) -> SimpleNamespace:
    """A batch of two whose prompt is read; its next tokens and positions at addresses that stay."""
    import tiny_models

    from lighttransfer import LightTransferCache

    prompts = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate(LENGTHS)]
    ids, mask = (x.to(device) for x in tiny_models.left_pad(prompts))
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = LightTransferCache(model.config)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache).logits
    return SimpleNamespace(
        ids=ids, mask=mask, cache=cache, token=logits[:, -1:].argmax(-1), position=positions[:, -1:] + 1
    )


def captured(device: str, step: Callable[[], None]) -> Callable[[], object]:
    """Runs ``step`` once; returns what runs it again with everything frozen that Python computed."""
    if device == "cpu":
        from device_only import Recording

        with Recording() as recording:
            step()
        return lambda: recording.replay(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return graph.replay


@torch.no_grad()
def model_graph(device: str) -> None:
    """A model's step, captured once after ``reserve``, replayed across page boundaries and ring wraps: the tokens are
    those of eager steps."""
    model = tiny_model(device)

    def decode(x: SimpleNamespace) -> None:
        logits = model(input_ids=x.token, position_ids=x.position, cache=x.cache).logits
        x.token.copy_(logits[:, -1:].argmax(-1))
        x.position.add_(1)

    eager, graphed = request(model, device), request(model, device)
    want, got = [], []
    for _ in range(STEPS):  # they also warm up what a capture must not initialise
        decode(eager)
        want.append(eager.token.clone())

    graphed.cache.reserve(STEPS)
    replay: Callable[[], object] | None = None
    for _ in range(STEPS):
        with graphed.cache.decode_step():
            if replay is None:
                key = graphed.cache.graph_key
                replay = captured(device, lambda: decode(graphed))
            else:
                assert graphed.cache.graph_key == key
                replay()
        got.append(graphed.token.clone())
    assert torch.equal(torch.cat(want, 1), torch.cat(got, 1)), "tokens differ"
    assert graphed.cache.lengths == eager.cache.lengths == [length + STEPS for length in LENGTHS]
    on_device = graphed.cache.attention_layers[0].clock.seq_len.tolist()
    assert on_device == graphed.cache.lengths, "the device has counted other tokens than the host"
    layers = zip(eager.cache.attention_layers, graphed.cache.attention_layers, strict=True)
    assert all(a.recent == b.recent and any(a.recent + b.recent) for a, b in layers if a.recent != [0, 0])


def generate_in_graphs(device: str) -> None:
    """``generate`` with a ``compile_config`` whose backend is CUDA graphs: the tokens are those of eager steps."""
    model = tiny_model(device)
    from transformers import CompileConfig

    x = request(model, device)
    config = CompileConfig(backend="cudagraphs" if device != "cpu" else "aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    settings = {"attention_mask": x.mask, "max_new_tokens": STEPS, "do_sample": False}
    want = model.generate(x.ids, **settings)
    got = model.generate(x.ids, **settings, compile_config=config)
    assert torch.equal(want, got), "tokens differ"
    again = model.generate(x.ids, **settings, compile_config=config)
    assert torch.equal(want, again), "tokens differ in a second call, which has another cache"


MODEL_CHECKS: list[Callable[[str], None]] = [model_graph, generate_in_graphs]
