"""What transformers and users ask of the cache: lengths, rows, tokens taken back, captured steps, chunks, a report."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..settings import Settings
from .calls import OpenPrefill
from .paged_cache import PagedCache
from .report import CacheReport, make_report
from .undo import is_whole, put_back


class CacheLength(int):
    """A key length that comes from a :class:`LightTransferCache`: how the mask function recognises one."""


#: The key length of a decode step that the host does not see: such a step needs no mask.
NO_MASK = CacheLength(0)


class LightTransferCache(PagedCache):
    """K/V of a batch of requests, each of which keeps some layers whole and streams the others (arXiv:2410.13846).

    Lengths are logical: :meth:`get_seq_length` counts the tokens seen, whatever a layer still holds. Which layers
    stream is decided per request at the end of its prompt, layer by layer while the prompt is being read: as soon as
    one layer too many is full, the laziest is cut to its window and its pages hold the next layer's keys. A prompt
    inside the window is left whole and its choice deferred (:class:`~lighttransfer.settings.Settings`). A layer that
    was cut never becomes whole again; the choice is final, unless ``reselect_every`` or ``reselect_turns`` cut more.

    The model must attend through lighttransfer (:func:`lighttransfer.enable`, or
    ``attn_implementation="lighttransfer"``). The first call of several tokens is taken for the whole prompt. If it
    comes in chunks, say so beforehand, by ``prompt_length`` or by :meth:`begin_prefill`; the choice then waits for the
    last chunk. Later calls of several tokens are turns of the conversation: they attend to what is left of the cache
    and choose nothing, unless the choice is still open and the sequence has outgrown the window, or ``reselect_turns``
    is set and memory asks for it. A call of one token per row is a decode step; its token is real in every row,
    whatever the mask says, until a later prompt's mask says that a row's last tokens were padding.

    Args:
        config: the model's config; says which layers have full attention. Its ``lighttransfer`` entry, if any, holds
            the settings.
        settings: overrides the config's.
        prompt_length: tokens of a prompt that comes in chunks, padding included.
        max_length: tokens that the sequences can grow to, if known; the pool is never grown beyond their need.
        process_group: the tensor parallel group over which scores are reduced; ``None``: this rank has all heads.
        devices: the device of each layer of a model that is spread over several, so that each device's pool has room
            for its own layers and no others (``generate`` tells them); ``None``: all are taken to be on one.
        **changes: single settings, such as ``full_layers=0.75``.

    Raises:
        ValueError: a model or a setting that does not fit, with the reason; ``devices`` of another number than layers.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lighttransfer import LightTransferCache
        >>> sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_attention_heads=4)
        >>> config = LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2)
        >>> config._attn_implementation = "lighttransfer"
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = LightTransferCache(config, full_layers=2, n_sink=2, n_recent=6, page_size=4)
        >>> ids = torch.arange(30)[None]
        >>> tokens = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
        >>> cache.get_seq_length(), len(cache.report().requests[0].streaming_layers)
        (32, 2)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        settings: Settings | None = None,
        *,
        prompt_length: int | None = None,
        max_length: int | None = None,
        process_group: Any = None,
        devices: Sequence[torch.device | str] | None = None,
        **changes: Any,
    ) -> None:
        settings = (settings or Settings.of(config)).replace(**changes)
        super().__init__(config, settings, max_length, process_group, devices)
        if prompt_length is not None:
            self.begin_prefill(prompt_length)

    def __deepcopy__(self, memo: dict[int, Any]) -> LightTransferCache:
        """An independent copy, such as of a prompt's cache from which several answers start."""
        copy_ = object.__new__(type(self))
        memo[id(self)] = copy_
        with torch.inference_mode(False):  # what inference mode copies could not be written outside of it
            copy_.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        for layer in copy_.attention_layers:
            layer.belong_to(copy_)
        copy_.choice.belong_to(copy_)
        copy_.decoding.belong_to(copy_)
        return copy_

    # What transformers asks.

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        """Tokens seen, padding included; inside :meth:`decode_step` as int64 ``[]`` on the device, because an int would
        be frozen in a graph."""
        if self.decoding.is_open:
            return self.attention_layers[0].clock.n_seen
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.decoding.is_open:
            return NO_MASK, 0
        sizes: tuple[int, int] = self._mask_sizes(query_length)
        return sizes

    @torch.compiler.disable  # dynamo cannot make an int of another class
    def _mask_sizes(self, query_length: int) -> tuple[int, int]:
        return CacheLength(self._seen + query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first call."""
        return len(self.lengths) or -1

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: no ring has overwritten anything, or calls are recorded."""
        return self.records_past or is_whole(self)

    def activate_past_recording(self) -> None:
        """From the next call on, what rings overwrite is kept until :meth:`crop`, which can then take tokens back.

        Calls that are recorded, but for the first of all and prompts that are announced (:meth:`begin_prefill`,
        :meth:`announce_prompt`), are drafts: each token is a decode step, and a choice that decode steps make waits for
        the crop that says which ones stay.
        What was recorded is forgotten when rows change places.
        """
        for layer in self.attention_layers:
            layer.record_past = True
        self._forget_calls()

    def stop_recording(self) -> None:
        """The calls so far stay, and later ones are not recorded."""
        for layer in self.attention_layers:
            layer.record_past = False
        self._forget_calls()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens of every row, and what was recorded.

        Full layers forget by counting less, and so do rings that have not wrapped. A ring that has wrapped goes back as
        far as the recorded calls know what they overwrote, or to its sinks, which are never overwritten: at most
        ``n_sink`` tokens are left of every row then (0 with native sliding-window layers). A layer that was cut stays
        cut.

        Raises:
            ValueError: a positive number, more tokens than there are behind the last padding of any row, or tokens
                whose predecessors a ring has lost; the cache is as it was.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        n_tokens = -int(tokens_to_remove)
        if n_tokens and self.lengths:
            n_real = self._seen - max(self._real_from)
            if n_real < n_tokens:
                raise ValueError(
                    f"tokens_to_remove must be at least {-n_real}: before these there are no tokens, or padding in "
                    f"some row, got {-n_tokens}"
                )
            put_back(self, n_tokens)
            self._seen -= n_tokens
            self.decoding.reserved = [0] * len(self.lengths)
            self._shorten([n_tokens] * len(self.lengths))
        self._forget_calls()
        if self.records_past and self.lengths:
            self._accept_drafts(n_tokens)

    def reset(self) -> None:
        """Forgets everything, that calls are recorded too; the settings stay."""
        for layer in self.attention_layers:
            layer.clear()
            layer.record_past = False
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes row ``beam_idx[i]``, its layer choice included; rows that come from one share its pages."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype is torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select(indices.tolist())

    def _select(self, rows: list[int]) -> None:
        if not self.lengths or rows == list(range(len(self.lengths))):
            return
        self.decoding.collect()
        for layer in self.attention_layers:
            layer.select(rows)
        self.choice.select(rows)
        self.finished = frozenset(at for at, row in enumerate(rows) if row in self.finished)
        self._real_from = [self._real_from[row] for row in rows]
        self.decoding.select(rows)
        self._set_lengths([self.lengths[row] for row in rows])
        self.row_bytes = [self.row_bytes[row] for row in rows]
        self.peak_row_bytes = [self.peak_row_bytes[row] for row in rows]
        if self._prefill is not None:
            self._prefill.lengths = [self._prefill.lengths[row] for row in rows]
        self.shares_pages = True
        self._forget_calls()  # what was recorded belongs to rows as they stood

    # Decode steps that Python does not run: compiled ones, CUDA graphs.

    def reserve(self, n_tokens: int) -> None:
        """Maps the pages of each row's next ``n_tokens`` tokens now.

        Without it a page is mapped before the decode step that needs it. Reserved pages count as held until the tokens
        come; :meth:`crop`, :meth:`reset` and ``reserve(0)`` give them back. After ``reserve`` the tensors that decode
        steps use stay where they are for ``n_tokens`` steps, and the host has no pages to map on the way.

        Raises:
            RuntimeError: no prompt has been read, one is open, calls are recorded, or a step is open.
            TypeError, ValueError: ``n_tokens`` is no int of at least 0.
        """
        self.decoding.reserve(n_tokens)

    def decode_step(self) -> AbstractContextManager[None]:
        """A context in which one decode step runs without the host: compiled in one graph, captured, or replayed.

        On entry the host prepares the step (a page where a row's last one is full), on exit it counts the token and
        takes a deferred choice that is due. In between the model's call changes device tensors alone: no value goes to
        or comes from the host, nothing is allocated but what the ops and the model return, and :meth:`get_seq_length`
        is a device tensor. Exactly one step has to be run per context; what is captured is not run, so capturing a
        graph and replaying it once is one step. ``generate`` does all this by itself.

        Raises:
            RuntimeError: no prompt has been read, one is open, calls are recorded, or a step is open.
        """
        return self.decoding.step()

    @property
    def graph_key(self) -> tuple[int, ...]:
        """What a captured decode step depends on besides its inputs; read it inside :meth:`decode_step`.

        A graph may be replayed as long as the key is the one it was captured under. It changes when a tensor had to be
        replaced (a pool that grew: :meth:`reserve` prevents that) and while a deferred choice is measured.
        """
        return self.decoding.graph_key

    # Prompts that come in chunks.

    def begin_prefill(self, prompt_length: int | None = None) -> None:
        """The next calls bring one prompt in chunks; layers are chosen at its end and not before.

        Args:
            prompt_length: the prompt's tokens, padding included, from here on; the call that completes them ends the
                prompt. ``None``: it ends with :meth:`end_prefill`.

        Raises:
            RuntimeError: a prompt is open already.
            ValueError: ``prompt_length`` below 1.
        """
        if self._prefill is not None:
            raise RuntimeError("a prompt is open already: end_prefill() comes first")
        if prompt_length is not None and prompt_length < 1:
            raise ValueError(f"prompt_length must be at least 1, got {prompt_length}")
        self._prefill = OpenPrefill(prompt_length, self._seen, list(self.lengths))

    def announce_prompt(self) -> None:
        """While calls are recorded: the next one, if it has several tokens, is no draft but a prompt."""
        self._prompt_comes = True

    def tokens_until_choice(self) -> int:
        """How many more tokens make some row choose its layers; a very large number if none will. At least 1."""
        dues = ((self.choice.due_at(row), length) for row, length in enumerate(self.lengths))
        return min((max(1, due - length) for due, length in dues if due is not None), default=2**31)

    def report(self) -> CacheReport:
        """What happened so far: per request the scores, which layers stream, and the bytes."""
        return make_report(self)
