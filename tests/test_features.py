"""The tables of features and of refusals name tests that exist, and errors that the package raises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "features.md"
REFUSALS = TESTS.parent / "docs" / "cache.md"


def named_tests() -> list[str]:
    """``file::name`` of every test in the tables."""
    return re.findall(r"`(test_\w+\.py::\w+)`", TABLE.read_text() + REFUSALS.read_text())


def collected_tests(files: list[str]) -> set[str]:
    """``file::name`` of every test, and of every class of tests, that pytest finds in ``files``."""
    paths = [str(TESTS / file) for file in files]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *paths]
    out = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    ids = re.findall(r"^tests/(\w+\.py)::(\w+)", out.stdout, re.MULTILINE)
    return {f"{file}::{name}" for file, name in ids}


def test_every_test_in_the_table_exists() -> None:
    named = named_tests()
    assert len(named) > 50
    assert not set(named) - collected_tests(sorted({name.split("::")[0] for name in named}))


def test_every_row_names_a_test() -> None:
    lines = TABLE.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| feature |")]
    assert len(rows) > 40
    assert [row for row in rows if "::" not in row or len(row.strip("|").split("|")) != 4] == []


def test_every_refusal_is_an_error_that_the_package_raises() -> None:
    sources = "\n".join(path.read_text() for path in (TESTS.parent / "lighttransfer").rglob("*.py"))
    sources = re.sub(r'"\n\s*f?"', "", sources)  # messages of several lines
    section = REFUSALS.read_text().split("## What is refused")[1]
    errors = re.findall(r"^\|[^|]*\|[^|]*\|[^|`]*`([^`]*)` \| `test_", section, re.MULTILINE)
    assert len(errors) > 20
    assert [error for error in errors if error not in sources] == []
