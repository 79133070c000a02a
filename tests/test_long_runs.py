"""Very many decode steps: memory stays what it was, and results stay those of the reference."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import reference_model as ref
import ring_oracle
import tiny_models
import torch
from hybrid_runs import References, assert_books, streaming
from torch._subclasses.fake_tensor import FakeTensor

import lighttransfer
from lighttransfer.cache import LightTransferCache

N_LAYERS = 2
WINDOW = {"n_sink": 3, "n_recent": 14}
WINDOW_SIZE = 17
PAGE = 8  # three pages hold 24 slots, of which 17 are used
#: The last row's prompt lies inside the window: its layers are cut while it decodes.
PROMPTS = [tiny_models.prompt(length, seed=length) for length in (41, 29, 5)]
#: Steps after which every row has outgrown the window twice, and results are those of a tail of tokens.
SETTLED = 60


def live_bytes() -> int:
    """Bytes of every tensor that the process can still reach, a storage counted once."""
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        # What torch.compile leaves of other tests' graphs, its fake tensors, has no storage.
        if issubclass(type(value), torch.Tensor) and not issubclass(type(value), FakeTensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def sampled_steps(n_steps: int) -> list[int]:
    """Steps to look at: soon, at the end, and at distances that grow in between; no two at the same slot by rule."""
    steps, at = [], float(SETTLED)
    while at < n_steps - 1:
        steps.append(int(at))
        at = 1.7 * at + 1
    return [*steps, n_steps - 1]


def tokens_of(n_steps: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(n_steps):
        yield torch.randint(2, tiny_models.VOCAB, (len(PROMPTS),), generator=generator).tolist()


class Oracle:
    """Python-list rings of every row and layer, fed with the keys and values that the cache is given."""

    def __init__(self, cache: LightTransferCache) -> None:
        self.rings = [[ring_oracle.Row(**WINDOW) for _ in PROMPTS] for _ in range(N_LAYERS)]
        self._update = cache.update
        cache.update = self.update

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        for row, ring in enumerate(self.rings[layer]):
            n_tokens = k.shape[2] if k.shape[2] == 1 else len(PROMPTS[row])
            for at in range(-n_tokens, 0):
                ring.append(k[row, :, at], v[row, :, at])
        return self._update(k, v, layer, **kwargs)

    def check(self, cache: LightTransferCache) -> None:
        """The rings' pages hold the lists' tokens, bit for bit."""
        for layer, rings in zip(cache.attention_layers, self.rings, strict=True):
            table = layer.blocks.flush()
            for row, ring in enumerate(rings):
                assert ring.length == cache.lengths[row]
                for slot, (_, k, v) in enumerate(ring.slots):
                    page = int(table[row, slot // PAGE])
                    assert torch.equal(layer.pool.k[page, slot % PAGE], k), f"row {row}, slot {slot}"
                    assert torch.equal(layer.pool.v[page, slot % PAGE], v), f"row {row}, slot {slot}"


def tail_logits(references: References, row: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """``[V]`` in float64 and in the model's precision: the logits after the row's last token.

    What a streaming layer makes of a query depends on the sinks and on the ``n_recent`` latest tokens, whose own inputs
    depend on the ``n_recent`` before each, and so on down the layers: the sinks and a tail of ``n_recent`` tokens a
    layer decide the logits, however long the row. The rotary angles are single precision's, as in every model: at
    position 100,000 their rounding alone, which is no property of a cache, moves logits by 1e-2.
    """
    n_sink, n_recent = WINDOW.values()
    positions = [*range(n_sink), *range(len(row) - N_LAYERS * n_recent, len(row))]
    rotary = references.exact.model.model.rotary_emb
    angles = type(rotary)(references.exact.model.config)(torch.empty(0), torch.tensor([positions]))
    ids = [row[position] for position in positions]
    exact, plain = (
        reference.run_tail(ids, positions, angles, **WINDOW) for reference in (references.exact, references.plain)
    )
    return exact, plain.double()


@torch.no_grad()
@pytest.mark.parametrize("n_steps", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_is_flat_and_results_are_the_references(n_steps: int) -> None:
    model = tiny_models.build(tiny_models.llama(num_hidden_layers=N_LAYERS, max_position_embeddings=1 << 18))
    references = References(model)
    lighttransfer.enable(model, full_layers=0, page_size=PAGE, **WINDOW)
    cache = LightTransferCache(model.config)
    oracle = Oracle(cache)
    ids, mask = tiny_models.left_pad(PROMPTS)
    settings = {"cache": cache, "use_cache": True}
    model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), **settings)
    rows = [list(prompt) for prompt in PROMPTS]
    samples, flat = sampled_steps(n_steps), None
    for step, tokens in enumerate(tokens_of(n_steps)):
        inputs = {
            "input_ids": torch.tensor(tokens)[:, None],
            "position_ids": torch.tensor([[len(row)] for row in rows]),
        }
        logits = model(**inputs, **settings).logits[:, -1]
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        if step not in samples:
            continue
        assert streaming(cache) == [frozenset(range(N_LAYERS))] * len(PROMPTS)
        oracle.check(cache)
        exact, plain = zip(*(tail_logits(references, row) for row in rows), strict=True)
        ref.assert_as_close_as_plain_torch(logits, torch.stack(exact), torch.stack(plain), what=f"step {step}")
        del exact, plain
        assert_books(cache)
        (pool,) = cache.pools.values()
        assert pool.n_used == N_LAYERS * len(PROMPTS) * -(-WINDOW_SIZE // PAGE)
        now = (pool.n_pages, pool.storage_bytes, pool.peak_storage_bytes, live_bytes())
        flat = flat or now
        assert now == flat, f"step {step}: pages, storage, its peak, and all tensors' bytes"
    assert cache.get_seq_length() == ids.shape[1] + n_steps
