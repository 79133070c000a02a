"""The arithmetic of the retained window and of the ring that stores it: the only place in Python that knows it.

Positions count a request's real tokens from 0; left padding is not counted. ``csrc/window.h`` is the same page in C++.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._arguments import check_count


@dataclass(frozen=True)
class RetainedWindow:
    """What a streaming layer keeps of a sequence: the first ``n_sink`` tokens and the ``n_recent`` latest ones.

    The kept set of ``length`` tokens is ``{j : j < n_sink or j >= length - n_recent}`` (arXiv:2410.13846, section
    3.2), a set: where sinks and recent tokens overlap they count once, and a sequence of at most :attr:`size` tokens
    is kept whole. While decoding the window rolls: the query at position ``t`` sees ``j <= t`` with ``j < n_sink`` or
    ``j > t - n_recent``, itself included.

    A streaming layer stores position ``p`` at :meth:`slot` of a ring of :attr:`size` slots. The slot is a function of
    the position alone, so nothing has to be moved or remembered when the window rolls.

    Args:
        n_sink: tokens kept from the start of the sequence, at least 0.
        n_recent: latest tokens kept, the current one included, at least 1.

    Raises:
        TypeError: a value that is no int.
        ValueError: a value below its minimum.

    Example:
        >>> window = RetainedWindow(n_sink=2, n_recent=3)
        >>> window.kept(8)
        [0, 1, 5, 6, 7]
        >>> [window.slot(p) for p in window.kept(8)]
        [0, 1, 2, 3, 4]
        >>> window.visible(2, 4), window.visible(2, 5)
        (True, False)
    """

    n_sink: int
    n_recent: int

    def __post_init__(self) -> None:
        check_count("n_sink", self.n_sink, 0)
        check_count("n_recent", self.n_recent, 1)

    @property
    def size(self) -> int:
        """Slots of the ring, and tokens that a streaming layer can hold."""
        return self.n_sink + self.n_recent

    def slot(self, position: int) -> int:
        """The ring's slot that stores ``position``."""
        if position < self.n_sink:
            return position
        return self.n_sink + (position - self.n_sink) % self.n_recent

    def n_slots(self, length: int) -> int:
        """Slots in use after ``length`` tokens."""
        return min(length, self.size)

    def position(self, slot: int, length: int) -> int:
        """The position that ``slot``, below ``n_slots(length)``, holds after ``length`` tokens."""
        if slot < self.n_sink:
            return slot
        return slot + (length - 1 - slot) // self.n_recent * self.n_recent

    def recent_begin(self, length: int) -> int:
        """First kept position that is no sink; ``length`` where there is none."""
        return min(max(self.n_sink, length - self.n_recent), length)

    def kept(self, length: int) -> list[int]:
        """The positions kept of ``length`` tokens, in order."""
        return [*range(min(self.n_sink, length)), *range(self.recent_begin(length), length)]

    def keeps_all(self, length: int) -> bool:
        """Whether a sequence of ``length`` tokens lies inside the window, so that a cut would drop nothing."""
        return length <= self.size

    def visible(self, key: int, query: int) -> bool:
        """Whether the query at position ``query`` sees the key at position ``key`` in a streaming layer."""
        return key <= query and (key < self.n_sink or key > query - self.n_recent)
