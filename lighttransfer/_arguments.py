"""The check of a count that every argument of that kind goes through."""

from __future__ import annotations


def check_count(name: str, value: object, minimum: int) -> int:
    """``value`` as an int; ``TypeError``/``ValueError`` with the argument's name, the rule and the value."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value
