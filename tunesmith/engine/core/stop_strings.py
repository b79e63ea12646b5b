"""Incremental search for stop strings in the text of sampled tokens.

Each token decodes only the last few tokens. A token that ends within a character adds no text until the character is
complete. The matcher reports that a stop string has appeared; the caller truncates the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoders write it for bytes that do not form a whole character."""

MAX_CHARACTER_TOKENS = 8
"""A character has at most four bytes: with more pending tokens than this the bytes are invalid, not incomplete."""


class StopMatcher:
    """Searches the text of one request for its stop strings."""

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
        is_partial = text.endswith(REPLACEMENT) and len(self._ids) - self._num_read < MAX_CHARACTER_TOKENS
        if len(text) > len(read) and not is_partial:
            self._tail = window[-self._num_kept :] if self._num_kept else ""
            self._ids = self._ids[self._num_read :]
            self._num_read = len(self._ids)
        return any(stop in window for stop in self._stop)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
