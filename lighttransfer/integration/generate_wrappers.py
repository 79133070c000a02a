"""What stands between ``generate`` and a cache: the drafts that it verifies, and the rows that it has finished with."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..cache import LightTransferCache


class RowsThatFinish(StoppingCriteriaList):
    """Stopping criteria that tell the cache which rows have finished before others.

    ``generate`` goes on to feed such rows with padding. Neither memory nor attention is spent on it, and above all it
    pushes nothing out of the rings: the next turn finds the row's last tokens there.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.cache: LightTransferCache | None = None
        self._done: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_done: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        if self.cache is not None and self.cache.batch_size == len(is_done):
            # The last token of a row is read in the next step like any other; only what follows it is padding.
            before = set(self._done)
            self._done |= {row for row, done in enumerate(is_done.tolist()) if done}
            if len(self._done) < len(is_done):
                self.cache.finish_rows(before)
            else:
                self.cache.resume_rows()
        return is_done


class TimelyDrafts:
    """A candidate generator whose proposals end where layers are chosen, so that a choice comes when it would without.

    Assisted decoding would read the prompt and a draft behind it in one call. The layers are chosen on the prompt, and
    the draft must be read by the model that streams: so the prompt goes first, alone, as if none of the first draft's
    tokens had been right. Nor does a later draft reach beyond the token after which a choice is due.
    """

    def __init__(self, generator: Any, cache: Any) -> None:
        self._generator = generator
        self._cache = cache
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """The tokens with a proposed continuation, and the continuation's logits if there are any."""
        ids, logits = self._generator.get_candidates(input_ids, *args, **kwargs)
        n_given = input_ids.shape[1]
        n_drafts = ids.shape[1] - n_given
        if self._is_first:
            n_timely = 0
            if isinstance(self._cache, LightTransferCache):
                self._cache.announce_prompt()
        elif isinstance(self._cache, LightTransferCache):
            n_timely = min(n_drafts, self._cache.tokens_until_choice() - 1)  # the token before them is read too
        else:
            n_timely = n_drafts
        self._is_first = False
        if n_timely == n_drafts:
            return ids, logits
        return ids[:, : n_given + n_timely], logits[:, :n_timely] if logits is not None and n_timely else None
