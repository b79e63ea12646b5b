"""Sampled token ids to text: all at once, or one token at a time.

Special tokens are removed, except those that delimit reasoning and tool calls. The pieces returned by
`IncrementalDetokenizer` concatenate to what `decode` returns for all ids: a token that ends inside a UTF-8 character is
held back until the character is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""Decoded in place of invalid UTF-8, so also in place of an incomplete character."""


class Detokenizer:
    """Decodes the token ids of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, hidden_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._hidden_ids = frozenset(hidden_ids)
        # a third of the time of the Rust decoder, which builds a string for each token
        is_bytes = type(getattr(self._backend, "decoder", None)) is decoders.ByteLevel
        self._bytes_of = ByteTable(self._backend, self._hidden_ids) if is_bytes else None

    def decode(self, ids: Sequence[int], *, extra_hidden_ids: Collection[int] = ()) -> str:
        """Text of the ids without special tokens and `extra_hidden_ids`."""
        if self._bytes_of is not None and not extra_hidden_ids:
            return b"".join(map(self._bytes_of.__getitem__, ids)).decode(errors="replace")
        hidden = self._hidden_ids.union(extra_hidden_ids)
        return self._decode([token_id for token_id in ids if token_id not in hidden])

    def decode_text(self, ids: Sequence[int]) -> str | None:
        """Text of the ids; None if one of them is a hidden special token."""
        return self.decode(ids) if self._hidden_ids.isdisjoint(ids) else None

    def build_incremental(self, *, extra_hidden_ids: Collection[int] = ()) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self, self._hidden_ids.union(extra_hidden_ids))

    def _decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:  # the same text, without the tokenizer's type check of each id
            text = self._backend.decode(ids, skip_special_tokens=False)
        else:
            text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class ByteTable(dict[int, bytes]):
    """Token id -> bytes of its text, for byte-level vocabularies; filled as ids are looked up."""

    def __init__(self, backend: Any, hidden_ids: Collection[int]) -> None:
        super().__init__(dict.fromkeys(hidden_ids, b""))
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = text = read_byte_level(self._backend.id_to_token(token_id) or "")
        return text


BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
"""The alphabet of byte-level BPE (Radford et al., 2019)."""
BYTE_CHARACTERS = frozenset(BYTE_OF_CHARACTER)


def read_byte_level(token: str) -> bytes:
    return bytes(map(BYTE_OF_CHARACTER.__getitem__, token)) if BYTE_CHARACTERS.issuperset(token) else token.encode()


def is_raw_byte(token: str | None) -> bool:
    """Whether a token is one byte of a byte-fallback vocabulary, such as `<0xE4>`."""
    return isinstance(token, str) and len(token) == 6 and token.startswith("<0x")


class IncrementalDetokenizer:
    """Decodes one token at a time.

    Pending ids (since the last complete character) are decoded together with the previous ones as context, because
    some decoders treat the first token of a text differently.
    """

    def __init__(self, detokenizer: Detokenizer, hidden_ids: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._hidden_ids = hidden_ids
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        """Text completed by this token."""
        if token_id in self._hidden_ids:
            return ""
        self._pending.append(token_id)
        if is_raw_byte(self._detokenizer._tokenizer.convert_ids_to_tokens(token_id)):
            return ""  # it decodes together with its neighbors
        text = self._decode_pending()
        if text.endswith(REPLACEMENT):
            return ""
        self._context, self._pending = self._pending, []
        self._context_text = self._detokenizer._decode(self._context)
        return text

    def finish(self) -> str:
        """Text of an incomplete last character, as replacement characters."""
        text = self._decode_pending() if self._pending else ""
        self._pending = []
        return text

    def _decode_pending(self) -> str:
        return self._detokenizer._decode(self._context + self._pending)[len(self._context_text) :]
