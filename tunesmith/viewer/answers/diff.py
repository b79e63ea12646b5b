"""The difference of two texts, word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Any

WORD = re.compile(r"\s+|\w+|[^\w\s]")
MAX_WORDS = 6000
"""Longer texts are compared line by line, which is quadratic in far fewer parts."""


def diff_texts(before: str, after: str) -> list[dict[str, Any]]:
    """Parts in order: `=` in both, `-` only before, `+` only after."""
    a, b = WORD.findall(before), WORD.findall(after)
    if max(len(a), len(b)) > MAX_WORDS:
        a, b = before.splitlines(keepends=True), after.splitlines(keepends=True)
    parts: list[dict[str, Any]] = []
    for kind, a_start, a_end, b_start, b_end in SequenceMatcher(None, a, b, autojunk=len(a) > MAX_WORDS).get_opcodes():
        if kind == "equal":
            parts.append({"kind": "=", "text": "".join(a[a_start:a_end])})
            continue
        removed, added = "".join(a[a_start:a_end]), "".join(b[b_start:b_end])
        parts += [{"kind": "-", "text": removed}] if removed else []
        parts += [{"kind": "+", "text": added}] if added else []
    return parts
