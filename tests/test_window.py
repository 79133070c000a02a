"""The window arithmetic against literal sets and a list of (position) that a ring would hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighttransfer import RetainedWindow

windows = st.builds(RetainedWindow, st.integers(0, 6), st.integers(1, 9))


@given(windows, st.integers(0, 60))
def test_kept_is_the_set_of_sinks_and_recent(window: RetainedWindow, length: int) -> None:
    expected = {j for j in range(length) if j < window.n_sink or j >= length - window.n_recent}
    assert window.kept(length) == sorted(expected)
    assert window.keeps_all(length) == (len(expected) == length)
    assert window.n_slots(length) == len(expected)
    recent = [j for j in expected if j >= window.n_sink]
    assert window.recent_begin(length) == (min(recent) if recent else length)


@given(windows, st.integers(1, 60))
def test_a_ring_holds_what_is_kept(window: RetainedWindow, length: int) -> None:
    ring: dict[int, int] = {}
    for position in range(length):
        ring[window.slot(position)] = position
    assert sorted(ring) == list(range(window.n_slots(length)))
    assert sorted(ring.values()) == window.kept(length)
    assert all(window.position(slot, length) == position for slot, position in ring.items())


@given(windows, st.integers(0, 40))
def test_visible_is_what_the_ring_holds_after_the_query_itself(window: RetainedWindow, query: int) -> None:
    assert [j for j in range(50) if window.visible(j, query)] == window.kept(query + 1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((-1, 4), ValueError, "n_sink must be at least 0, got -1"),
        ((4, 0), ValueError, "n_recent must be at least 1, got 0"),
        ((1.5, 4), TypeError, "n_sink must be an int, got float"),
        ((4, True), TypeError, "n_recent must be an int, got bool"),
    ],
)
def test_bad_windows(arguments: tuple[int, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RetainedWindow(*arguments)
