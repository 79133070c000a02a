"""The command ``lighttransfer``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

_NEEDS = "lighttransfer's command line needs transformers, rich, gguf and accelerate: pip install 'lighttransfer[cli]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0, 1 if something failed, 2 for wrong arguments.

    Args:
        argv: the arguments; ``None``: the process's.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from lighttransfer.models import ModelError

        from . import demo, generate, inspect
        from .options import UsageError
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "lighttransfer":
            raise
        print(f"{_NEEDS} ({error.name} is missing)", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(
        prog="lighttransfer",
        description="LightTransfer: the lazy layers of a pretrained transformer decode from a small ring buffer "
        "(arXiv:2410.13846).",
        epilog="Start with `lighttransfer demo`.",
    )
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for command in (demo, generate, inspect):
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        args.run(args)
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
