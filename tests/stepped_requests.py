"""Batches in the middle of decoding, stepped by hand: what the tests of captured and compiled steps compare."""

from __future__ import annotations

import tiny_models
import torch
from hybrid_runs import WINDOW, streaming
from transformers import PreTrainedModel

import lighttransfer
from lighttransfer.cache import LightTransferCache

PAGE = 4
N_STEPS = 20
SETTINGS = {**WINDOW, "n_last": 4, "page_size": PAGE}
LENGTHS = (23, 13, 18)
LONG = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate(LENGTHS)]
SHORT = [
    tiny_models.prompt(length, seed=seed) for seed, length in enumerate((8, 3, 2))
]  # measured, not measured, and measured again

#: Which rows are full and which are rings, and what the steps measure.
CASES = {
    "equal": ({"full_layers": 2}, [prompt[:13] for prompt in LONG]),  # the model counts positions itself
    "full": ({"full_layers": 1.0}, LONG),
    "ring": ({"full_layers": 0}, LONG),
    "mixed": ({"full_layers": 2}, LONG),
    "mass": ({"full_layers": 2}, SHORT),  # a deferred choice: measured, then taken
    "outputs": ({"full_layers": 2, "policy": "output_error"}, SHORT),
}


class Request:
    """A batch in the middle of decoding, stepped by hand with inputs at fixed addresses."""

    def __init__(self, settings: dict[str, object], prompts: list[list[int]], architecture: str = "llama") -> None:
        self.model: PreTrainedModel = tiny_models.build(tiny_models.ARCHITECTURES[architecture]())
        lighttransfer.enable(self.model, **{**SETTINGS, **settings})
        self.cache = LightTransferCache(self.model.config)
        ids, mask = tiny_models.left_pad(prompts)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=self.cache)
        self.token = out.logits[:, -1:].argmax(-1)
        self.position: torch.Tensor | None = positions[:, -1:] + 1 if len(set(map(len, prompts))) > 1 else None
        self.tokens = [self.token.clone()]

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        return self.model(input_ids=self.token, position_ids=self.position, cache=self.cache).logits

    def take(self, logits: torch.Tensor) -> None:
        """What the caller does between steps: the next token into the tensor that the step reads."""
        self.token.copy_(logits[:, -1:].argmax(-1))
        if self.position is not None:
            self.position.add_(1)
        self.tokens.append(self.token.clone())

    def answer(self) -> list[list[int]]:
        return torch.cat(self.tokens, 1).tolist()


def stepped(settings: dict[str, object], prompts: list[list[int]], architecture: str = "llama") -> Request:
    """The same request, decoded as everywhere else."""
    request = Request(settings, prompts, architecture)
    for _ in range(N_STEPS):
        request.take(request.forward())
    return request


def assert_same(a: Request, b: Request) -> None:
    assert a.answer() == b.answer()
    assert a.cache.lengths == b.cache.lengths
    assert a.cache.get_seq_length() == b.cache.get_seq_length()
    assert streaming(a.cache) == streaming(b.cache)
    for x, y in zip(a.cache.report().requests, b.cache.report().requests, strict=True):
        assert x.scores == y.scores
        assert (x.length, x.is_decided, x.bytes_held) == (y.length, y.is_decided, y.bytes_held)
