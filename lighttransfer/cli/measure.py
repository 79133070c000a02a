"""Runs ``generate`` and measures it from outside: speed, K/V bytes while it runs, and what the cache reports."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

import lighttransfer
from lighttransfer.cache import CacheReport

#: Called with (steps done, steps in all); a step is a layer of the prefill or a token.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Attributes:
        name: what tables call it.
        settings: arguments of :func:`lighttransfer.enable`; ``None``: transformers' sdpa and DynamicCache.
    """

    name: str
    settings: dict[str, Any] | None = None


FULL_CACHE = Variant("full cache")


@dataclass
class Measured:
    """What one run did.

    Attributes:
        name: the variant's.
        text: the answer, up to the end-of-sequence token.
        prompt_tokens, new_tokens: their numbers.
        prefill_seconds: from the prompt's first layer to the first new token.
        step_seconds: of each decode step, so one less than ``new_tokens``.
        kv_bytes, kv_peak_bytes: K/V bytes at the end, and the most at any time.
        prefill_bytes: K/V bytes after each layer of the prefill.
        decode_bytes: K/V bytes after each decode step.
        report: the hybrid cache's; ``None`` for another cache.
    """

    name: str
    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    step_seconds: list[float]
    kv_bytes: int
    kv_peak_bytes: int
    prefill_bytes: list[int] = field(default_factory=list)
    decode_bytes: list[int] = field(default_factory=list)
    report: CacheReport | None = None

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_speed(self) -> float:
        """Tokens per second of the median decode step; 0 without one."""
        return 1 / median(self.step_seconds) if self.step_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the speeds included."""
        return {**asdict(self), "prefill_speed": self.prefill_speed, "decode_speed": self.decode_speed}


def kv_bytes(cache: Any) -> int:
    """Bytes of K and V that ``cache`` holds: pages in use, or the storages of another cache's tensors."""
    if isinstance(cache, lighttransfer.LightTransferCache):
        return sum(pool.bytes_in_use for pool in cache.pools.values())
    tensors = (getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values"))
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Sequence[int],
    variant: Variant,
    *,
    new_tokens: int,
    stop_at_eos: bool = True,
    progress: Progress | None = None,
) -> Measured:
    """Generates greedily and measures. The model is left disabled.

    Args:
        input_ids: the prompt.
        new_tokens: the most tokens to generate.
        stop_at_eos: ``False``: go on for exactly ``new_tokens``, so that speeds of different answers compare; the text
            still ends at the first end-of-sequence token.
    """
    ids = torch.tensor([list(input_ids)], device=model.device)
    meter = _Meter(model, new_tokens, progress)
    if variant.settings is not None:
        lighttransfer.enable(model, **variant.settings)
    try:
        with meter.attached(), _eos(model, stop_at_eos) as eos, torch.inference_mode():
            generate: Any = model.generate
            output = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                streamer=meter,
            )
    finally:
        lighttransfer.disable(model)
    answer: list[int] = output.sequences[0, ids.shape[1] :].tolist()
    shown = next((at for at, token in enumerate(answer) if token in eos), len(answer))
    report = meter.cache.report() if isinstance(meter.cache, lighttransfer.LightTransferCache) else None
    held = kv_bytes(meter.cache)
    return Measured(
        name=variant.name,
        text=str(tokenizer.decode(answer[:shown], skip_special_tokens=True)).strip(),
        prompt_tokens=ids.shape[1],
        new_tokens=len(answer),
        prefill_seconds=meter.times[1] - meter.times[0],
        step_seconds=[later - earlier for earlier, later in zip(meter.times[1:], meter.times[2:], strict=False)],
        kv_bytes=held,
        kv_peak_bytes=report.peak_bytes if report else max([held, *meter.prefill_bytes, *meter.decode_bytes]),
        prefill_bytes=meter.prefill_bytes,
        decode_bytes=meter.decode_bytes,
        report=report,
    )


class _Meter(BaseStreamer):
    """Notes when tokens come, and what the cache holds after each layer of the prefill and after each decode step."""

    def __init__(self, model: PreTrainedModel, new_tokens: int, progress: Progress | None) -> None:
        self.layers = decoder_layers(model)
        self.new_tokens = new_tokens
        self.progress = progress
        self.synchronize = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
        self.times: list[float] = []  # when the prompt came, then each token
        self.prefill_bytes: list[int] = []
        self.decode_bytes: list[int] = []
        self.cache: Any = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        hooks = [layer.register_forward_hook(self._after_layer, with_kwargs=True) for layer in self.layers]
        self._prefill_hooks, self._last_hook = hooks[:-1], hooks[-1]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _after_layer(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.cache is None:
            self.cache = kwargs["cache"] if kwargs.get("cache") is not None else kwargs["past_key_values"]
        if len(self.times) < 2:
            self.prefill_bytes.append(kv_bytes(self.cache))
            self._tell(len(self.prefill_bytes))
        else:
            self.decode_bytes.append(kv_bytes(self.cache))

    def _tell(self, steps: int) -> None:
        if self.progress is not None:
            self.progress(steps, len(self.layers) + self.new_tokens)

    def put(self, value: torch.Tensor) -> None:
        self.synchronize()
        self.times.append(time.perf_counter())
        if len(self.times) == 2:
            for hook in self._prefill_hooks:  # decode runs with one hook, not with one for each layer
                hook.remove()
        if len(self.times) > 1:
            self._tell(len(self.layers) + len(self.times) - 1)

    def end(self) -> None:
        pass


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's ``forward`` calls its cache; transformers is renaming it."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The model's decoder layers in order.

    Raises:
        ValueError: the model has no list of as many modules as its config names layers.
    """
    n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == n_layers:
            return list(module)
    raise ValueError(f"model must have a list of its {n_layers} decoder layers, got {type(model).__name__}")


@contextmanager
def _eos(model: PreTrainedModel, stop: bool) -> Iterator[frozenset[int]]:
    """The end-of-sequence tokens; generation does not stop at them unless ``stop``."""
    config = model.generation_config
    saved = config.eos_token_id, config.pad_token_id
    eos = saved[0] if isinstance(saved[0], list) else [saved[0]]
    try:
        if not stop:
            config.eos_token_id = None
        if config.pad_token_id is None:
            config.pad_token_id = next((token for token in eos if token is not None), 0)
        yield frozenset(token for token in eos if token is not None)
    finally:
        config.eos_token_id, config.pad_token_id = saved


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    info: dict[str, Any] = {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    return info


def machine_line() -> str:
    """:func:`machine` in one line."""
    info = machine()
    line = f"{info['cpu']}, {info['cores']} cores, {info['threads']} threads, {info['isa']}, torch {info['torch']}"
    return f"{info['gpu']}; {line}" if "gpu" in info else line
