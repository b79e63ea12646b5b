"""Strings of special tokens in messages: they stay text.

A tokenizer reads the string of a special token as that token wherever it stands, so that a tool result that holds
`<|im_end|>` could end its own turn and begin another. `mark` puts two private-use characters in place of each such
string in what the template is given; the special tokens of the rendered text are then the template's own. `encode`
gives the ids of text with marks: marked strings as plain text, all else as the tokenizer reads it. Text without marks
does not come here, so its ids are the tokenizer's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from tunesmith.chat.memo import build_cache_key

MARK = "\U0010fffd"
"""First character of a mark; the second says which string it stands for."""
FIRST_INDEX = 0x100000
"""Code point of the second character of the first mark; these, too, are for private use."""
NUM_PREFIX_CHARACTERS = 2
"""Of each string: messages that hold no such beginning hold no special token."""
LONG_CHARACTERS = 32768
"""Encoding one text blocks other threads; longer texts, of 20 ms and more, go as a batch of one, which does not."""

Restore = Callable[[re.Match[str]], str]


class SpecialTokens:
    """The special tokens of one tokenizer, and text that spells them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Mapping[str, int]) -> None:
        """`ids` are the special tokens that messages must not become, by their strings."""
        self._tokenizer = tokenizer
        self._ids = ids
        self._is_special = frozenset(ids.values()) - {tokenizer.unk_token_id}
        longest_first = sorted(filter(None, ids), key=len, reverse=True)
        strings = [*longest_first, MARK]
        self._marks = {text: MARK + chr(FIRST_INDEX + index) for index, text in enumerate(strings)}
        self._strings = {mark: text for text, mark in self._marks.items()}
        self._own_pattern = _match_any(longest_first)
        self._pattern = _match_any(strings)
        self._mark_pattern = re.compile(f"{MARK}[{chr(FIRST_INDEX)}-{chr(FIRST_INDEX + len(strings) - 1)}]")
        self._prefixes = tuple({text[:NUM_PREFIX_CHARACTERS].encode() for text in strings})

    def mark(self, value: Any) -> Any:
        """A JSON value with marks in its texts; the value itself where no text holds a special token."""
        frozen = build_cache_key(value)
        if frozen is not None and not any(prefix in frozen for prefix in self._prefixes):
            return value
        return self._mark_all(value)

    def _mark_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._marks[found.group()], value)
        if isinstance(value, Mapping):
            return {self._mark_all(key): self._mark_all(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_all(each) for each in value]
        return value

    def unmark(self, text: str) -> str:
        """The text as its author wrote it."""
        return self._mark_pattern.sub(lambda found: self._strings[found.group()], text) if MARK in text else text

    def encode(self, text: str) -> list[int]:
        """Ids of text with marks; no marked string becomes a special token."""
        num_own = sum(self._ids[found] in self._is_special for found in self._own_pattern.findall(text))
        for is_broken in (False, True):  # where a marked string is a word of the vocabulary, its halves are encoded
            ids = self._encode_marked(text, is_broken=is_broken)
            if sum(token_id in self._is_special for token_id in ids) <= num_own:
                return ids
        raise ValueError("the messages hold the text of a special token, for which the tokenizer has no other ids")

    def _encode_marked(self, text: str, *, is_broken: bool) -> list[int]:
        if isinstance(getattr(self._tokenizer, "backend_tokenizer", None), Tokenizer):
            encoder = self._encoder
            return encoder.encode(text, self._mark_pattern, self._restore_with(encoder.gap if is_broken else ""))
        return self._encode_parts(text, is_broken=is_broken)

    def _restore_with(self, gap: str) -> Restore:
        """What replaces a mark: its string, with a gap after the first character."""

        def restore(found: re.Match[str]) -> str:
            text = self._strings[found.group()]
            return text[:1] + gap + text[1:]

        return restore

    @cached_property
    def _encoder(self) -> _LiteralEncoder:
        return _LiteralEncoder(self._tokenizer, self._ids)

    def _encode_parts(self, text: str, *, is_broken: bool) -> list[int]:
        """For tokenizers in Python: parts between the template's special tokens are encoded one by one."""
        gap = secrets.token_hex(16) if is_broken else ""
        ids: list[int] = []
        for part in re.split(f"({self._own_pattern.pattern})", text):
            shown = self._mark_pattern.sub(self._restore_with(gap), part)
            for piece in shown.split(gap) if gap else (shown,):
                ids += self._tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=shown != part)
        return ids


class _LiteralEncoder:
    """A copy of a tokenizer that reads strings of ours as its special tokens, and the strings of those as text.

    They divide the text as the special tokens do, so that ids around a marked string are those without it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Mapping[str, int]) -> None:
        """Takes a tenth of a second or more, and as much memory as the tokenizer."""
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        nonce = secrets.token_hex(16)  # nobody's text holds it
        tokens = {text: (token_id, AddedToken(text, normalized=False)) for text, token_id in ids.items()}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                tokens[token.content] = (token_id, token)
        self._stand_ins = {text: f"{nonce}{index}." for index, text in enumerate(tokens)}
        self.gap = f"{nonce}-"
        """Text on both sides of it is encoded apart."""
        for text, (_, token) in tokens.items():
            self._add(
                self._stand_ins[text],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
        self._add(self.gap, normalized=False)
        self._real_ids: dict[int | None, int] = {
            self._backend.token_to_id(self._stand_ins[text]): token_id for text, (token_id, _) in tokens.items()
        }
        self._gap_id = self._backend.token_to_id(self.gap)
        self._pattern = _match_any(sorted(tokens, key=len, reverse=True))

    def _add(self, text: str, **options: bool) -> None:
        self._backend.add_tokens([AddedToken(text, special=False, **options)])

    def encode(self, text: str, mark_pattern: re.Pattern[str], restore: Restore) -> list[int]:
        own = self._pattern.sub(lambda found: self._stand_ins[found.group()], text)
        ids = encode_text(self._backend, mark_pattern.sub(restore, own))
        return [self._real_ids.get(token_id, token_id) for token_id in ids if token_id != self._gap_id]


def encode_text(backend: Tokenizer, text: str, *, adds_special_tokens: bool = False) -> list[int]:
    """Ids of a text; other threads run while a long one is encoded."""
    if len(text) <= LONG_CHARACTERS:
        return backend.encode(text, add_special_tokens=adds_special_tokens).ids
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
    return encoding.ids


def _match_any(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
