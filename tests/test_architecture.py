"""The layers of the package are those of docs/design.md, section 5, and nothing imports upwards."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lighttransfer"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layers() -> list[str]:
    """The files and folders of the package from the bottom up, as the design lists them."""
    house = (ROOT / "docs" / "design.md").read_text().split("\nlighttransfer/")[1].split("\ntests/")[0]
    return re.findall(r"^  ([\w.]+)/? ", house, re.MULTILINE)


def imported(module: Path) -> set[str]:
    """The dotted names that a module imports, in functions and for types too; the package's own start with a dot."""
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(re.sub(r"^lighttransfer\b", "", node.module or "") or "lighttransfer")
        elif isinstance(node, ast.ImportFrom):
            package = module.parts[: len(module.parts) - node.level]
            names |= {".".join(("", *package, node.module or alias.name)) for alias in node.names}
    return names


def test_the_design_lists_every_file_and_folder() -> None:
    parts = {path.parts[0] for path in MODULES}
    assert sorted(layers()) == sorted(parts)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_module_imports_upwards(module: Path) -> None:
    order = [layer.removesuffix(".py") for layer in layers()]
    above = order[order.index(module.parts[0].removesuffix(".py")) + 1 :]
    assert [name for name in sorted(imported(module)) if name.startswith(".") and name.split(".")[1] in above] == []


def test_the_layers_below_the_cache_need_torch_alone() -> None:
    below = layers()[: layers().index("cache")]
    users = [str(path) for path in MODULES for name in imported(path) if name.split(".")[0] == "transformers"]
    assert users
    assert [user for user in users if Path(user).parts[0] in below] == []


def test_every_folder_is_packed() -> None:
    listed = re.findall(r'^    "(lighttransfer[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    folders = {path.parent for path in PACKAGE.rglob("__init__.py")}
    assert sorted(listed) == sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)
