"""Decode steps that the host does not see: no host value, no allocation, frozen Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import device_only
import pytest
import torch
from device_only import Recording, no_host
from hybrid_runs import WINDOW_SIZE, streaming
from stepped_requests import CASES, LONG, N_STEPS, SHORT, Request, assert_same, stepped


@pytest.mark.parametrize("case", CASES)
def test_a_step_needs_no_host_value_and_allocates_nothing(case: str) -> None:
    settings, prompts = CASES[case]
    with device_only.tables_on_a_device():
        request = Request(settings, prompts)
        held = {request.cache.attention_layers[0].pool.n_used}
        for _ in range(N_STEPS):
            with request.cache.decode_step():
                with no_host():
                    logits = request.forward()
                held.add(request.cache.attention_layers[0].pool.n_used)
            request.take(logits)
    expected = stepped(settings, prompts)
    assert_same(request, expected)
    if case != "ring":
        assert len(held) > 2, "no page boundary was crossed"
    if prompts is SHORT:
        assert all(report.is_decided for report in request.cache.report().requests)
    rows = streaming(request.cache)
    assert (len(set(rows)) > 1) == (case not in ("full", "ring")), "rows chose alike"
    assert all(length > 2 * WINDOW_SIZE for length in request.cache.lengths), "no ring has wrapped"


@pytest.mark.parametrize("bracket", [True, False])
@pytest.mark.parametrize("case", ["full", "ring", "mixed"])
def test_reserved_steps_need_the_host_for_nothing(case: str, bracket: bool) -> None:
    """With the pages mapped ahead, what lies between the steps does not touch the device either."""
    settings, prompts = CASES[case]
    with device_only.tables_on_a_device():
        request = Request(settings, prompts)
        request.cache.reserve(N_STEPS)
        key = request.cache.graph_key
        logits = []
        for _ in range(N_STEPS):
            step: Callable[[], AbstractContextManager[None]] = request.cache.decode_step if bracket else nullcontext
            with no_host(), step():
                logits.append(request.forward())
            request.take(logits[-1])
            assert request.cache.graph_key == key
    request.cache.reserve(0)
    assert_same(request, stepped(settings, prompts))


@pytest.mark.parametrize("case", CASES)
def test_a_frozen_step_is_every_step(case: str) -> None:
    """One step recorded and replayed, as a CUDA graph would, gives the answers of the steps that Python runs."""
    settings, prompts = CASES[case]
    with device_only.tables_on_a_device():
        request = Request(settings, prompts)
        recordings: dict[tuple[int, ...], tuple[Recording, torch.Tensor]] = {}
        for _ in range(N_STEPS):
            with request.cache.decode_step():
                key = request.cache.graph_key
                if key in recordings:
                    recording, recorded = recordings[key]
                    logits = recording.replay(recorded)
                else:
                    with Recording() as recording:
                        logits = request.forward()
                    recordings[key] = recording, logits
            request.take(logits)
    assert len(recordings) <= N_STEPS // 2, "hardly anything was replayed"
    assert_same(request, stepped(settings, prompts))


def test_reserved_steps_are_one_recording() -> None:
    settings, prompts = CASES["mixed"]
    with device_only.tables_on_a_device():
        request = Request(settings, prompts)
        request.cache.reserve(N_STEPS)
        with request.cache.decode_step(), Recording() as recording:
            logits = recorded = request.forward()
        for _ in range(N_STEPS - 1):
            request.take(logits)
            with request.cache.decode_step():
                logits = recording.replay(recorded)
        request.take(logits)
    request.cache.reserve(0)
    assert_same(request, stepped(settings, prompts))


def test_rows_that_share_pages_write_to_their_own() -> None:
    answers = []
    rows = [1, 1, 0]
    for shared, reserve in ((False, 0), (True, 0), (True, N_STEPS)):
        request = Request({"full_layers": 2}, LONG if shared else [LONG[row] for row in rows])
        if shared:
            request.cache.reorder_cache(torch.tensor(rows))
            request.token, request.position = request.token[rows].clone(), request.position[rows].clone()
        request.token[1] = 40  # two copies of a row that go their own ways
        request.cache.reserve(reserve)
        for _ in range(N_STEPS):
            with request.cache.decode_step():
                logits = request.forward()
            request.take(logits)
        answers.append([row[1:] for row in request.answer()])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] != answers[0][1]
