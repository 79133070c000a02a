"""What :func:`lighttransfer.enable` can be told, in one value that lives in the model's config."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ._arguments import check_count
from .selection import LazyRatio, Policy, StaticLayers, make_policy
from .window import RetainedWindow


@dataclass(frozen=True)
class Settings:
    """How a model streams. Defaults are the paper's (arXiv:2410.13846, section 4.1).

    Args:
        full_layers: how many of the model's full-attention layers keep their whole cache: a count (int), or a share of
            them (float in [0, 1], rounded half up). Native sliding-window layers neither count nor compete.
        n_sink, n_recent: the window that the other layers keep (:class:`~lighttransfer.window.RetainedWindow`).
        n_last: the prompt's last queries, on which the choice rests.
        policy: which layers stay full: a name, ``{"name": ..., **fields}``, or a
            :class:`~lighttransfer.selection.Policy`. A :class:`~lighttransfer.selection.StaticLayers` policy brings its
            own count; ``full_layers`` is not used then.
        defer_windows: a prompt inside the window says nothing about the layers (section 5.2), so all stay full until
            the sequence is longer than ``defer_windows`` times the window; then the choice is made from the masses of
            the last ``n_last`` decode steps.
        page_size: tokens in a page of the pool.
        reselect_every: every so many decode steps full layers may be cut later, if memory asks for it: if the request's
            pages would outgrow ``reselect_bytes`` before the next look. Then the layers that are still full are scored
            by the masses of the last ``n_last`` decode steps, and the worst are cut until the rest fits. A cut layer
            never comes back. ``None``: never.
        reselect_turns: the same at the end of each later prompt of several tokens, scored by its own last ``n_last``
            queries. Off, the choice is frozen at the first prompt.
        reselect_bytes: what the K/V pages of one request may take (on this rank, where heads are split): see above.

    Raises:
        TypeError, ValueError: the argument, its rule and the value.

    Example:
        >>> from lighttransfer import Settings
        >>> Settings(full_layers=8, policy="nonsink_peak").policy.name
        'nonsink_peak'
    """

    full_layers: int | float = 0.5
    n_sink: int = 4
    n_recent: int = 1020
    n_last: int = 32
    policy: Policy = field(default_factory=LazyRatio)
    defer_windows: float = 2.0
    page_size: int = 64
    reselect_every: int | None = None
    reselect_turns: bool = False
    reselect_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", make_policy(self.policy))
        if isinstance(self.full_layers, bool) or not isinstance(self.full_layers, (int, float)):
            raise TypeError(f"full_layers must be a count (int) or a share (float), got {self.full_layers!r}")
        if isinstance(self.full_layers, float) and not 0 <= self.full_layers <= 1:
            raise ValueError(f"full_layers must lie in [0, 1] as a share, got {self.full_layers}; a count is an int")
        if isinstance(self.full_layers, int):
            check_count("full_layers", self.full_layers, 0)
        RetainedWindow(self.n_sink, self.n_recent)
        check_count("n_last", self.n_last, 1)
        check_count("page_size", self.page_size, 1)
        if not self.defer_windows >= 1:
            raise ValueError(f"defer_windows must be at least 1, got {self.defer_windows}")
        self._check_reselection()

    def _check_reselection(self) -> None:
        for name in ("reselect_every", "reselect_bytes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        if not isinstance(self.reselect_turns, bool):
            raise TypeError(f"reselect_turns must be a bool, got {self.reselect_turns!r}")
        if not self.reselect_turns and self.reselect_every is None:
            if self.reselect_bytes is not None:
                raise ValueError(
                    f"reselect_bytes must come with reselect_every or reselect_turns, got {self.reselect_bytes} alone"
                )
            return
        name = "reselect_turns" if self.reselect_turns else "reselect_every"
        if self.reselect_bytes is None:
            raise ValueError(f"reselect_bytes must be given with {name}, got None: it says when memory asks for it")
        if self.policy.is_fixed:
            raise ValueError(f"{name} must go with a policy that scores layers, got policy={self.policy.name!r}")

    @property
    def window(self) -> RetainedWindow:
        """What a streaming layer keeps."""
        return RetainedWindow(self.n_sink, self.n_recent)

    def n_full(self, n_layers: int) -> int:
        """How many of ``n_layers`` full-attention layers stay full.

        Raises:
            ValueError: a count larger than ``n_layers``.
        """
        if isinstance(self.policy, StaticLayers):
            return len(self.policy.layers)
        if isinstance(self.full_layers, float):
            return int(self.full_layers * n_layers + 0.5)
        if self.full_layers > n_layers:
            raise ValueError(
                f"full_layers must be at most the model's {n_layers} full-attention layers, got {self.full_layers}"
            )
        return self.full_layers

    def replace(self, **changes: Any) -> Settings:
        """These settings with some changed; ``None`` changes nothing.

        Raises:
            TypeError: no such setting.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in changes.items():
            if name not in values:
                raise TypeError(f"{name} must be one of {sorted(values)}")
            if value is not None:
                values[name] = value
        return Settings(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what ``config.lighttransfer`` holds, so that it survives ``save_pretrained``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "policy": self.policy.to_dict()}

    @classmethod
    def of(cls, config: Any) -> Settings:
        """The settings that a model's config holds; the defaults where it holds none."""
        values = getattr(config, "lighttransfer", None)
        if values is None and hasattr(config, "get_text_config"):
            values = getattr(config.get_text_config(decoder=True), "lighttransfer", None)
        return cls() if values is None else cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """The inverse of :meth:`to_dict`."""
        return cls(**values)
