"""The command ``lighttransfer``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from .parser import make_parser

_NEEDS = "the command line needs transformers, rich, gguf, accelerate and matplotlib: pip install 'lighttransfer[cli]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0, 1 if something failed, 2 for wrong arguments.

    Args:
        argv: the arguments; ``None``: the process's.
    """
    args = make_parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from .models import ModelError
        from .options import UsageError

        command = importlib.import_module(f".{args.command}", __name__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "lighttransfer":
            raise
        print(f"lighttransfer: {error.name} is missing; {_NEEDS}", file=sys.stderr)
        return 1
    try:
        command.run(args)
    except UsageError as error:
        print(f"lighttransfer: {error}", file=sys.stderr)
        return 2
    except ModelError as error:
        print(f"lighttransfer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lighttransfer: interrupted", file=sys.stderr)
        return 130
    return 0
