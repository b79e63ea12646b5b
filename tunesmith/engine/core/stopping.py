"""Where the reply of a request ends: every condition that sampled tokens decide is here, for all engines.

A condition is a field of `Sampling`, its check in `check_stops`, and a case of `StopConditions.find_end`; one that has
to look at every token also sets `has_stops`. Cancellations come from outside and are not among them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from tunesmith.chat.detokenize import REPLACEMENT
from tunesmith.engine.core.request import Request
from tunesmith.types import Sampling, StopReason

MAX_PARTIAL_TOKENS = 3
"""A character has at most four bytes, so at most three tokens are the start of one."""


def check_stops(sampling: Sampling, *, vocab_size: int, has_tokenizer: bool) -> None:
    """Raise ValueError for conditions that no reply could meet."""
    if sampling.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
    unknown = [token_id for token_id in sampling.stop_token_ids if not 0 <= token_id < vocab_size]
    if unknown:
        raise ValueError(f"stop_token_ids must lie in [0, {vocab_size}); got {unknown[0]}")


class StopConditions:
    """The conditions of one request; they see each of its tokens once, in order."""

    def __init__(
        self, request: Request, tokenizer: PreTrainedTokenizerBase | None, *, eos_ids: Collection[int]
    ) -> None:
        self._request = request
        self._end_ids = frozenset() if request.sampling.ignore_eos else eos_ids
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        stop = request.sampling.stop
        self._matcher = StopMatcher(tokenizer, stop) if stop and tokenizer is not None else None
        self.has_stops = self._matcher is not None or bool(self._stop_ids)
        """There are stop strings or stop token ids: every token must be looked at."""

    def find_end(self, token_ids: Sequence[int], *, num_to_eos: int | None = None) -> tuple[int, StopReason | None]:
        """How many of the newly sampled tokens belong to the reply, and why it ends there (None: it does not).

        `num_to_eos`: tokens up to the first end-of-sequence token, where the caller has found it for many rows at once.
        """
        request = self._request
        num_kept = min(len(token_ids), request.max_num_tokens - len(request.token_ids))
        if self.has_stops or (num_to_eos is None and self._end_ids):
            for index, token_id in enumerate(token_ids[:num_kept]):
                if token_id in self._end_ids:
                    return index + 1, "eos"
                if token_id in self._stop_ids or (self._matcher is not None and self._matcher.add(token_id)):
                    return index + 1, "stop"
        elif num_to_eos is not None and num_to_eos <= num_kept and self._end_ids:
            return num_to_eos, "eos"
        if len(request.token_ids) + num_kept < request.max_num_tokens:
            return num_kept, None
        return num_kept, "length" if request.num_sampled + num_kept == request.sampling.max_tokens else "context"


class StopMatcher:
    """Searches the text of one request for its stop strings, token by token.

    Each token decodes only the last few tokens. A token that ends within a character adds no text until the character
    is complete. The matcher reports that a stop string has appeared; the caller truncates the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._num_kept = max(map(len, self._stop), default=1) - 1
        self._tail = ""
        self._ids: list[int] = []
        self._num_read = 0  # tokens of `_ids` whose text is in the tail; the decoder needs them as context

    def add(self, token_id: int) -> bool:
        """Append the next token; True once a stop string is complete."""
        self._ids.append(token_id)
        read = self._decode(self._ids[: self._num_read])
        text = self._decode(self._ids)
        window = self._tail + text[len(read) :]
        num_ready, ready = len(self._ids), text
        if text.endswith(REPLACEMENT):
            num_ready = max(num_ready - MAX_PARTIAL_TOKENS, self._num_read)
            ready = self._decode(self._ids[:num_ready])
        if len(ready) > len(read) and text.startswith(ready):  # else it ends within a character
            self._tail = (self._tail + ready[len(read) :])[-self._num_kept :] if self._num_kept else ""
            self._ids = self._ids[self._num_read :]
            self._num_read = num_ready - self._num_read
        return any(stop in window for stop in self._stop)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
