"""``reserve`` and ``graph_key``: pages mapped ahead, and tensors that stay where they are."""

from __future__ import annotations

import torch
from hybrid_runs import WINDOW_SIZE
from stepped_requests import LENGTHS, LONG, N_STEPS, PAGE, SHORT, Request, assert_same, stepped


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def test_reserve_maps_exactly_and_gives_back() -> None:
    request = Request({"full_layers": 2}, LONG)
    cache = request.cache
    pool = cache.attention_layers[0].pool
    rings = 3 * len(LENGTHS) * pages(WINDOW_SIZE)

    def held(ahead: int) -> int:
        return rings + 2 * sum(pages(length + ahead) for length in LENGTHS)

    assert pool.n_used == held(0)
    for ahead in (30, 5, 0, 17):
        cache.reserve(ahead)
        assert pool.n_used == held(ahead)
        assert cache.report().bytes_in_use == held(ahead) * pool.page_bytes
    request.take(request.forward())
    assert pool.n_used == held(17), "the token came into a page that was reserved"
    cache.crop(0)
    request = Request({"full_layers": 1.0}, LONG)
    request.cache.reserve(17)
    request.cache.crop(-1)
    assert request.cache.attention_layers[0].pool.n_used == 5 * sum(pages(length - 1) for length in LENGTHS)


def test_a_choice_leaves_what_is_reserved_in_full_layers() -> None:
    """Rows that choose while others have long chosen: their cuts must not take the others' pages."""
    request = Request({"full_layers": 2}, [LONG[0], SHORT[1]])
    request.cache.reserve(N_STEPS)
    for _ in range(N_STEPS):
        with request.cache.decode_step():
            logits = request.forward()
        request.take(logits)
    assert all(report.is_decided for report in request.cache.report().requests)
    full = [layer for layer in request.cache.attention_layers if 0 in layer.recent]
    for layer in full:
        for row, recent in enumerate(layer.recent):
            if recent == 0:
                assert layer.blocks.n_slots(row) >= request.cache.lengths[row]
    request.cache.reserve(0)
    assert_same(request, stepped({"full_layers": 2}, [LONG[0], SHORT[1]]))


def test_what_is_reserved_moves_with_its_row() -> None:
    request = Request({"full_layers": 2}, LONG)
    request.cache.reserve(N_STEPS)
    rows = [2, 0, 1]
    request.cache.batch_select_indices(torch.tensor(rows))
    request.token, request.position = request.token[rows].clone(), request.position[rows].clone()
    request.take(request.forward())
    for layer in request.cache.attention_layers:
        for row, recent in enumerate(layer.recent):
            kept = WINDOW_SIZE if recent else LENGTHS[rows[row]] + N_STEPS
            assert layer.blocks.n_slots(row) == PAGE * pages(kept)


def test_tensors_stay_through_a_choice_and_a_reorder() -> None:
    """A captured step goes on after the host has cut layers or moved rows."""
    request = Request({"full_layers": 2}, SHORT)
    cache = request.cache
    cache.reserve(N_STEPS)

    def addresses() -> list[int]:
        tensors = [t for layer in cache.attention_layers for t in (layer.blocks.tensor, layer.n_recent)]
        return [t.data_ptr() for t in (*tensors, cache.attention_layers[0].clock.seq_len)]

    before = addresses()
    for _ in range(N_STEPS):
        request.take(request.forward())
    assert all(report.streaming_layers for report in cache.report().requests)
    assert addresses() == before
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.crop(0)
    assert addresses() == before
