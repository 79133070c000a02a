"""Every example in the documentation runs, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import lighttransfer

MODULES = ["lighttransfer"] + [
    module.name
    for module in pkgutil.walk_packages(lighttransfer.__path__, "lighttransfer.")
    if not module.name.endswith(("._C", ".__main__"))
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def _public() -> list[tuple[str, object]]:
    """What the package and its ops export: functions and classes, no modules and no exceptions."""
    exported = []
    for module in (lighttransfer, lighttransfer.ops):
        for name in module.__all__:
            value = getattr(module, name)
            is_exception = inspect.isclass(value) and issubclass(value, Exception)
            if callable(value) and not is_exception:
                exported.append((f"{module.__name__}.{name}", value))
    return exported


@pytest.mark.parametrize(("name", "value"), _public(), ids=lambda x: x if isinstance(x, str) else "")
def test_every_public_name_has_an_example(name: str, value: object) -> None:
    assert ">>> " in (inspect.getdoc(value) or ""), f"{name} has no example in its docstring"
