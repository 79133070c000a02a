"""Every example in the documentation runs, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch

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


@pytest.mark.parametrize("named", ["compile_config=", "cache.decode_step()"])
def test_the_readmes_compiled_examples(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL) if named in block)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # one graph or an error all the same
    model = lighttransfer.enable(tiny_models.build(tiny_models.llama()), full_layers=2, n_sink=2, n_recent=6)
    model.generation_config.max_new_tokens = 100
    inputs = {"input_ids": torch.tensor([tiny_models.prompt(30, seed=1)])}
    names: dict[str, object] = {"model": model, "inputs": inputs, "torch": torch}
    with torch.no_grad():
        exec("from lighttransfer import LightTransferCache\n" + code, names)
        if "cache" in names:
            expected = model.generate(**inputs, max_new_tokens=101, do_sample=False)[0, -1]
            assert names["token"].item() == expected
