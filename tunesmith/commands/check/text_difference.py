"""Two texts, quoted around the first character in which they differ."""

from __future__ import annotations

NUM_BEFORE, NUM_AFTER = 30, 60


def quote_difference(one: str, other: str) -> tuple[str, str]:
    """Both texts from shortly before their first different character."""
    pairs = zip(one, other, strict=False)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    start = max(first - NUM_BEFORE, 0)
    return _quote(one, start, first + NUM_AFTER), _quote(other, start, first + NUM_AFTER)


def _quote(text: str, start: int, end: int) -> str:
    return ("..." if start else "") + repr(text[start:end]) + ("..." if end < len(text) else "")
