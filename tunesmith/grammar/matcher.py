"""Which tokens may continue a reply under a grammar, computed by llguidance (the extra `tunesmith[grammar]`).

A grammar is text in llguidance's format. The masks of a reply are a function of the grammar, the tokenizer and the ids
of the reply, so nothing but these is recorded: the trainer computes the same masks again.

Axes: M matchers, Y bytes of a bitmask.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import ConfigError
from tunesmith.grammar.terms import load_llguidance

NUM_CACHED_REPLIES = 4096
"""Replies whose masks are kept; an update scores a reply in several passes."""
MIN_PARALLEL = 16
"""Fewer masks take less time one after another than in threads."""
NUM_CACHED_GRAMMARS = 256
"""Compiled grammars that are kept; the rollouts of a run use the same few."""


class TokenMatcher:
    """The state of one reply under a grammar."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        """`llguidance.LLMatcher`."""

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token; raises ValueError if the grammar does not allow it or becomes too complex."""
        if not self.matcher.consume_token(token_id):
            raise ValueError(f"the grammar rejects token {token_id}: {_shorten(self.matcher.get_error())}")


class GrammarCompiler:
    """Grammars for one tokenizer; llguidance's copy of the vocabulary is built at the first use."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`tokenizer` is a fast tokenizer of transformers, or None: then every grammar is refused."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._interned: dict[bytes, bytes] = {}
        """Masks that equal masks of other positions are stored once: those inside of texts all do."""
        self._open_cached = functools.lru_cache(maxsize=NUM_CACHED_GRAMMARS)(self._compile)
        self._compute_masks = functools.lru_cache(maxsize=NUM_CACHED_REPLIES)(self._replay)

    @functools.cached_property
    def _vocabulary(self) -> Any:
        llguidance = load_llguidance()
        if not self._eos_ids:
            raise ConfigError("a grammar needs an end-of-sequence token, and the model and its tokenizer define none")
        if self._tokenizer is None or not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError("a grammar needs a fast tokenizer (tokenizer.json), and this model has none")
        return llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids)

    def open(self, grammar: str) -> TokenMatcher:
        """A matcher at the start of a reply; raises ValueError if the grammar is invalid."""
        return TokenMatcher(self._open_cached(grammar).deep_copy())

    def _compile(self, grammar: str) -> Any:
        matcher = load_llguidance().LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar is invalid: {_shorten(matcher.get_error())}")
        return matcher

    @functools.cached_property
    def _executor(self) -> Any:
        return load_llguidance().LLExecutor()

    def fill_masks(self, matchers: Sequence[TokenMatcher]) -> NDArray[np.uint8]:
        """The masks [M, Y] of several replies; those of many are computed in threads."""
        num_words = -(-self._vocab_size // 32)
        masks = np.zeros((len(matchers), num_words), dtype=np.int32)
        if len(matchers) < MIN_PARALLEL:
            for row, each in enumerate(matchers):
                each.matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
        else:
            rows = [(matcher.matcher, row) for row, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * num_words, len(matchers))
        return masks.view(np.uint8)

    def compute_masks(self, grammar: str, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """For each token of a reply the bits of the ids that the grammar allowed in its place."""
        return self._compute_masks(grammar, tuple(token_ids))

    def _replay(self, grammar: str, token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
        if len(self._interned) > NUM_CACHED_REPLIES:
            self._interned.clear()
        matcher = self.open(grammar)
        masks = []
        for token_id in token_ids:
            mask = self.fill_masks([matcher]).tobytes()
            masks.append(self._interned.setdefault(mask, mask))
            matcher.accept(token_id)
        return tuple(masks)


def _shorten(error: str) -> str:
    """The first part of llguidance's message, without the state of its parser, in one line."""
    return " ".join(error.partition("<state>")[0].split())
