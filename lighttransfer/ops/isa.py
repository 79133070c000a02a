"""Which instruction set the CPU ops use."""

from __future__ import annotations

from .._library import call


def cpu_isa() -> str:
    """``"baseline"``, ``"avx2"`` or ``"avx512"`` (with bf16 dot products): the widest that this CPU has.

    ``LIGHTTRANSFER_CPU_ISA=NAME`` in the environment, read once, lowers it.

    Example:
        >>> from lighttransfer.ops import cpu_isa
        >>> cpu_isa() in ("baseline", "avx2", "avx512")
        True
    """
    result: str = call("cpu_isa")
    return result
