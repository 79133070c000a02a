"""Options of bench/microbenchmarks.py."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="context lengths, in tokens")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "length" in metafunc.fixturenames:
        metafunc.parametrize("length", metafunc.config.getoption("--lengths"))
