"""Escapes the strings of special tokens in messages, so that they are tokenized as plain text.

A tokenizer reads the string of a special token as that token anywhere in a text, so a tool result that contains
`<|im_end|>` could end its own turn and start another (prompt injection). `escape` replaces each such string in the
template's input by two private-use characters; all special tokens in the rendered text then come from the template.
`encode` tokenizes escaped text: escaped strings as plain text, all else as the tokenizer does. Text without escapes
is not passed to `encode`, so its ids are the tokenizer's own.
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

ESCAPE = "\U0010fffd"
"""First character of an escape sequence; the second character identifies the string."""
FIRST_CODE_POINT = 0x100000
"""Code point of the second character of the first escape sequence; also in a private-use plane."""
PREFIX_LENGTHS = (1, 2)
"""Lengths of the prefixes used as fast filters: messages without any of one length contain no special token."""

Unescape = Callable[[re.Match[str]], str]


class SpecialTokens:
    """Escapes and encodes strings that spell the special tokens of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Mapping[str, int]) -> None:
        """`ids`: string -> id of the special tokens to escape."""
        self._tokenizer = tokenizer
        self._has_backend = isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer)
        self._ids = ids
        self._is_special = frozenset(ids.values()) - {tokenizer.unk_token_id}
        strings = [*filter(None, ids), ESCAPE]
        self._escapes = {text: ESCAPE + chr(FIRST_CODE_POINT + index) for index, text in enumerate(strings)}
        self._strings = {escape: text for text, escape in self._escapes.items()}
        self._special_pattern = build_pattern(strings[:-1])
        self._pattern = build_pattern(strings)
        first, last = chr(FIRST_CODE_POINT), chr(FIRST_CODE_POINT + len(strings) - 1)
        self._escape_pattern = re.compile(f"{ESCAPE}[{first}-{last}]")
        self._prefixes = [tuple({text[:length].encode() for text in strings}) for length in PREFIX_LENGTHS]

    def escape(self, value: Any) -> Any:
        """Escape all strings in a JSON value; returns the value itself if none contains a special token."""
        cache_key = build_cache_key(value)
        for prefixes in self._prefixes:
            if cache_key is not None and not any(map(cache_key.__contains__, prefixes)):
                return value
        return self._escape_all(value)

    def _escape_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._escapes[found.group()], value)
        if isinstance(value, Mapping):
            return {self._escape_all(key): self._escape_all(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape_all(each) for each in value]
        return value

    def unescape(self, text: str) -> str:
        """The text with all escapes replaced by the original strings."""
        return self._escape_pattern.sub(lambda found: self._strings[found.group()], text) if ESCAPE in text else text

    def encode(self, text: str) -> list[int]:
        """Ids of escaped text; no escaped string becomes a special token."""
        num_expected = sum(self._ids[found] in self._is_special for found in self._special_pattern.findall(text))
        for is_split in (False, True):  # an escaped string that is also in the vocabulary is encoded in two parts
            if self._has_backend:
                unescape = self._build_unescape(self._encoder.separator if is_split else "")
                ids = self._encoder.encode(text, self._escape_pattern, unescape)
            else:
                ids = self._encode_split(text, is_split=is_split)
            if sum(token_id in self._is_special for token_id in ids) <= num_expected:
                return ids
        raise ValueError("the messages contain the text of a special token, which the tokenizer cannot encode as text")

    def _build_unescape(self, separator: str) -> Unescape:
        """A function that replaces an escape by its string, with `separator` after the first character."""

        def unescape(found: re.Match[str]) -> str:
            text = self._strings[found.group()]
            return text[:1] + separator + text[1:]

        return unescape

    @cached_property
    def _encoder(self) -> _LiteralEncoder:
        return _LiteralEncoder(self._tokenizer, self._ids)

    def _encode_split(self, text: str, *, is_split: bool) -> list[int]:
        """For tokenizers without a Rust backend: encode the parts between the template's special tokens separately."""
        separator = secrets.token_hex(16) if is_split else ""
        ids: list[int] = []
        for part in re.split(f"({self._special_pattern.pattern})", text):
            plain = self._escape_pattern.sub(self._build_unescape(separator), part)
            for piece in plain.split(separator) if separator else (plain,):
                ids += self._tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=plain != part)
        return ids


class _LiteralEncoder:
    """A copy of a tokenizer with placeholder strings for its special tokens, whose own strings are plain text.

    Placeholders split the text as the special tokens do, so ids around an escaped string are the same as without it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Mapping[str, int]) -> None:
        """Takes 0.1 s or more, and as much memory as the tokenizer."""
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        nonce = secrets.token_hex(16)  # cannot occur in a text by accident or on purpose
        tokens = {text: (token_id, AddedToken(text, normalized=False)) for text, token_id in ids.items()}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                tokens[token.content] = (token_id, token)
        self._placeholders = {text: f"{nonce}{index}." for index, text in enumerate(tokens)}
        self.separator = f"{nonce}-"
        """Text on both sides of it is encoded independently."""
        for text, (_, token) in tokens.items():
            self._add(
                self._placeholders[text],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
        self._add(self.separator, normalized=False)
        self._original_ids: dict[int | None, int] = {
            self._backend.token_to_id(self._placeholders[text]): token_id for text, (token_id, _) in tokens.items()
        }
        self._separator_id = self._backend.token_to_id(self.separator)
        self._pattern = build_pattern(tokens)

    def _add(self, text: str, **options: bool) -> None:
        self._backend.add_tokens([AddedToken(text, special=False, **options)])

    def encode(self, text: str, escape_pattern: re.Pattern[str], unescape: Unescape) -> list[int]:
        replaced = self._pattern.sub(lambda found: self._placeholders[found.group()], text)
        (encoding,) = self._backend.encode_batch_fast(
            [escape_pattern.sub(unescape, replaced)], add_special_tokens=False
        )
        return [self._original_ids.get(each, each) for each in encoding.ids if each != self._separator_id]


def build_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of the texts, the longest one first."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
