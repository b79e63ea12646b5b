"""Upper bound on the characters of one token, so that text can be rejected as too long before it is tokenized.

The bound exists only for tokenizers that assign every character to a token: byte-level or byte-fallback BPE, without
normalizers or pre-tokenizers that drop text and without added tokens that absorb the whitespace around them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

MAX_COMPOSED = 4
"""Most characters that Unicode normalization (NFC, NFKC) composes into one."""
CHARACTERS_OF_ONE = {
    "NFC": MAX_COMPOSED, "NFKC": MAX_COMPOSED, "NFD": 1, "NFKD": 1, "Prepend": 1, "Replace": 1, "Sequence": 1,
    "ByteLevel": 1, "Digits": 1, "Split": 1, "Metaspace": 1, "Punctuation": 1,
}  # fmt: skip
"""Normalizers and pre-tokenizers that drop no text -> how many characters they may merge into one."""
BYTES_AS_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def find_longest_token(tokenizer: Tokenizer) -> int | None:
    """Upper bound on the characters of a text that become one token; None if there is no known bound."""
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    steps = [step for part in parts for step in _iter_steps(json.loads(part.__getstate__()))]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps) and vocabulary.keys() >= set(
        ByteLevel.alphabet()
    )
    has_bytes = getattr(tokenizer.model, "byte_fallback", False) and vocabulary.keys() >= BYTES_AS_TOKENS
    is_complete = type(tokenizer.model).__name__ == "BPE" and (is_byte_level or has_bytes)
    if not is_complete or not all(map(_drops_nothing, steps)):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    return max(map(len, vocabulary)) * max((CHARACTERS_OF_ONE[step["type"]] for step in steps), default=1)


def _iter_steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield step
    for nested in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _iter_steps(nested)


def _drops_nothing(step: dict[str, Any]) -> bool:
    if step["type"] not in CHARACTERS_OF_ONE or step.get("behavior") == "Removed":
        return False
    if step["type"] != "Replace":
        return True
    replaced = step["pattern"].get("String")
    return replaced is not None and len(step["content"]) >= len(replaced)
