"""A cache's rows and the calls that move them on: what lies between the attention function and the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..paging.pool import KVPool
from ..settings import Settings
from .budget import prompt_pages
from .calls import Call, OpenPrefill, PromptStep
from .clock import Clock
from .decode_choice import DecodeChoice
from .decoding import Decoding
from .layer import CacheLayer
from .padding import read_mask
from .prompt_attention import attend
from .rows import Rows
from .supported_models import attention_windows
from .undo import RecordedCall


class PagedCache(Rows):
    """Rows of tokens over paged pools, fed by one call of the model after the other.

    A call goes through :meth:`update` and :meth:`attend` once per layer. In between the keys carry their layer to the
    attention function.

    Attributes:
        settings: how it streams.
        competing: the layers with full attention.
        pools, clocks: the pages, and the lengths on the device.
        choice: which layers each row keeps.
        row_bytes, peak_row_bytes: K/V bytes of each row's pages, now and at most.
        shares_pages: whether rows may have pages in common.
        decoding: the host's part of decode steps.
        is_compileable: whether ``generate`` may compile its decode steps; :func:`lighttransfer.enable` sets it.
        max_length: tokens that the rows can grow to, if known.
        process_group: over which the heads are split.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        settings: Settings,
        max_length: int | None,
        process_group: Any,
        devices: Sequence[torch.device | str] | None,
    ) -> None:
        self.settings = settings
        self.attention_layers = [
            CacheLayer(self, index, window or settings.window, competes=window is None)
            for index, window in enumerate(attention_windows(config))
        ]
        super().__init__(layers=list(self.attention_layers))
        self.competing = [layer for layer in self.attention_layers if layer.competes]
        self.max_length = max_length
        self.process_group = process_group
        self._compiles = False
        self._devices = None if devices is None else [torch.device(device) for device in devices]
        if self._devices is not None and len(self._devices) != len(self.attention_layers):
            raise ValueError(
                f"devices must have one entry for each of {len(self.attention_layers)} layers, got {len(self._devices)}"
            )
        self._clear()

    def _clear(self) -> None:
        self._clear_rows()
        self.pools: dict[tuple[int, int, torch.dtype, torch.device], KVPool] = {}
        self.row_bytes: list[int] = []
        self.peak_row_bytes: list[int] = []
        self.shares_pages = False
        self.choice = DecodeChoice(self)
        self.decoding = Decoding(self)
        self._prefill: OpenPrefill | None = None
        self._prompt_comes = False  # whether the next call is a prompt though calls are recorded
        self._handed: CacheLayer | None = None  # whose keys are on their way from update() to the attention function
        self._step: PromptStep | None = None  # the call in progress; None: a decode step, or none
        self._layers_left = 0  # of the call in progress

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Announces a layer's new keys and values, ``[B, H_kv, S, D]``, and returns them.

        They are written by the attention function, which knows the queries too and finds its layer as an attribute of
        the keys. So nothing is kept in the model, in the module or in a global, and caches, models and threads cannot
        mix.

        Raises:
            RuntimeError: the keys of the layer before never reached the attention function.
            ValueError: keys and values of different shapes (MLA), or not the batch of the call before.
        """
        if torch.compiler.is_compiling() and not self.decoding.is_open:
            return _untraced_update(self, key_states, value_states, layer_idx)
        handed, self._handed = self._handed, None
        # The same layer again: a call was refused before it changed anything.
        if handed is not None and (handed.index != layer_idx or self._layers_left > 0):
            raise RuntimeError(
                f"layer {handed.index} did not attend through lighttransfer: the model must be enabled with "
                "lighttransfer.enable(model) and pass its keys on as they are (after a call that failed midway the "
                "cache needs reset())"
            )
        layer = self.attention_layers[layer_idx]
        if not layer.is_initialized:
            if key_states.shape != value_states.shape:
                raise ValueError(
                    "value_states must have the shape of key_states (multi-head latent attention is not supported), "
                    f"got {tuple(value_states.shape)} and {tuple(key_states.shape)}"
                )
            layer.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(layer.recent):
            raise ValueError(
                f"key_states must have the cache's batch of {len(layer.recent)}, got {key_states.shape[0]}"
            )
        self._handed = layer
        key_states.lighttransfer_layer = layer  # type: ignore[attr-defined]
        return key_states, value_states

    # A call of the model.

    def attend(self, layer: CacheLayer, call: Call, mask: Tensor | None) -> Tensor:
        """A layer's attention over the cache and the call's own tokens, which are cached by it: ``[B, S, H_q, D]``.

        ``mask``: bool ``[B, seen + S]``, the padding; ``None``: there is none.
        """
        if self._handed is not layer:
            raise RuntimeError(f"layer {layer.index} attends to keys that update() has not announced")
        self._handed = None
        if self._layers_left == 0:
            self._begin(call.q, mask)
        if layer.attended:
            raise RuntimeError(
                f"layer {layer.index} comes again before the last layer has come: cache.reset() is needed"
            )
        layer.attended = True
        if self._step is None:
            out = layer.decode(call)
        else:
            layer.query_shape = (call.q.shape[2], call.q.shape[3])
            self._reserve(layer.pool, self._step)
            order = None if self._step.order is None else self._step.order.to(call.q.device)
            out = attend(layer, call if order is None else call.in_order(order), self._step)
            if order is not None:
                out = torch.empty_like(out).scatter_(1, order[:, :, None, None].expand_as(out), out)
        self._layers_left -= 1
        if self._layers_left == 0:
            self._end(call.q.shape[1])
        return out

    def _begin(self, q: Tensor, mask: Tensor | None) -> None:
        n_tokens = q.shape[1]
        if self.decoding.is_open:
            if n_tokens != 1:
                raise RuntimeError(f"a call inside decode_step() must bring one token per row, got {n_tokens}")
            self._step = None
        else:
            self._begin_on_host(q, mask)
        for layer in self.attention_layers:
            layer.attended, layer.appended = False, self._step is None
            if layer.record_past:
                layer.undo.append(None)
        self._layers_left = len(self.attention_layers)

    def _begin_on_host(self, q: Tensor, mask: Tensor | None) -> None:
        n_rows, n_tokens = q.shape[:2]
        if not self.lengths:
            self.lengths, self.row_bytes, self.peak_row_bytes = ([0] * n_rows for _ in range(3))
            self._real_from = [0] * n_rows
            self.choice.begin(n_rows)
            self.decoding.begin(n_rows)
        is_prompt = n_tokens > 1 or self._seen == 0 or self._prefill is not None
        if is_prompt or self.records_past:
            self.decoding.collect()
        self._step = self._prompt_step(n_tokens, mask) if is_prompt else None
        if not is_prompt:
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a decode step is captured inside `with cache.decode_step()`, which prepares it")
            self.decoding.before()

    def _prompt_step(self, n_tokens: int, mask: Tensor | None) -> PromptStep:
        prefill = self._prefill
        n_left = 0 if prefill is None else (prefill.length or 2**63) - (self._seen - prefill.columns)
        self.resume_rows()
        if mask is None and self._skipped:
            raise ValueError(
                "attention_mask must be given, got None: rows had finished before others, and what generate() went on "
                "to read for them is padding"
            )
        padding = read_mask(mask, self.lengths, self._seen, n_tokens, more_follows=n_left > n_tokens)
        if any(padding.n_void):
            self._drop_void(padding.n_void)
        for row, n_sure in enumerate(padding.n_sure):
            if n_sure < n_tokens:
                self._real_from[row] = self._seen + n_tokens - n_sure
        step = PromptStep(n_tokens, padding.starts, list(self.lengths), padding.order)
        if prefill is not None and prefill.columns == self._seen and prefill.length == n_tokens:
            self._prefill = None  # one chunk after all
        if self._prefill is not None:
            step.keeps_queries = self.choice.is_open
        elif self.records_past and self._seen > 0 and prefill is None and not self._prompt_comes:
            # While drafts are verified no call is a prompt but the first, and those that are announced.
            step.is_draft, step.measures = True, not step.is_padded and self.choice.measures(n_tokens)
            if not step.measures:
                self.choice.forget()
        else:
            step.decides = self.choice.start(step.lengths, step.totals)
        return step

    def _reserve(self, pool: KVPool, step: PromptStep) -> None:
        """Room for the whole prompt before its first layer, so that the pool does not have to grow on the way."""
        if pool.n_pages == 0:
            pool.reserve(prompt_pages(self, pool, step))

    def _end(self, n_tokens: int) -> None:
        step, self._step = self._step, None
        self._prompt_comes = False
        if self.records_past:
            self.recorded.append(RecordedCall(n_tokens, step is not None and (step.is_padded or bool(step.decides))))
        if step is None:
            for clock in self.clocks.values():
                clock.tick(measured=self.decoding.mass_n_recent >= 0)
            if not self.decoding.is_open:
                self.decoding.after()
            return
        self._seen += n_tokens
        if not step.is_draft:
            self.choice.settle(step)
        self._set_lengths(step.totals)
        prefill = self._prefill
        if prefill is not None and prefill.length is not None and self._seen - prefill.columns >= prefill.length:
            self.end_prefill()

    @property
    def is_compileable(self) -> bool:
        return self._compiles

    def compile_for(self, max_length: int | None) -> None:
        """``generate`` will compile decode steps until rows have ``max_length`` tokens; ``None``: it will not."""
        self._compiles = max_length is not None
        if max_length is not None:
            self.max_length = max(max_length, self.max_length or 0)

    # For layers.

    def layers_of(self, pool: KVPool) -> list[CacheLayer]:
        """The layers whose pages lie, or will lie, in ``pool``."""
        devices = self._devices or [pool.device] * len(self.attention_layers)
        return [
            layer
            for layer, device in zip(self.attention_layers, devices, strict=True)
            if (layer.pool is pool if layer.is_initialized else device == pool.device)
        ]

    def pool_for(self, keys: Tensor) -> KVPool:
        """The pool of keys like ``keys [B, H_kv, S, D]``."""
        key = (keys.shape[1], keys.shape[3], keys.dtype, keys.device)
        if key not in self.pools:
            self.pools[key] = KVPool(
                n_kv_heads=key[0], head_dim=key[1], dtype=key[2], device=key[3], page_size=self.settings.page_size
            )
        return self.pools[key]

    def clock_for(self, device: torch.device, n_rows: int) -> Clock:
        """The rows' lengths on ``device``."""
        if device not in self.clocks:
            self.clocks[device] = Clock(self.lengths or [0] * n_rows, self._seen, self.settings.n_last, device)
        return self.clocks[device]

    def account(self, row: int, n_bytes: int) -> None:
        """Notes that the row's pages grew by ``n_bytes``."""
        self.row_bytes[row] += n_bytes
        self.peak_row_bytes[row] = max(self.peak_row_bytes[row], self.row_bytes[row])

    @property
    def prefill_is_open(self) -> bool:
        """Whether more chunks of a prompt are expected."""
        return self._prefill is not None

    def end_prefill(self) -> None:
        """The prompt is complete: its rows choose their layers.

        Raises:
            RuntimeError: no prompt is open.
        """
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            raise RuntimeError("no prompt is open: begin_prefill() or prompt_length= must come before its first chunk")
        if self.lengths:
            self.choice.after_chunks(prefill.lengths or [0] * len(self.lengths))
            self.decoding.wake(self.lengths)


_untraced_update: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(PagedCache.update)
