"""Sentences that make an agent think again; one is drawn for each hint."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

GENERAL: tuple[str, ...] = (
    "Wait, I should go over this once more before I answer.",
    "Hold on, one of my steps may be wrong, so I check them in order.",
    "This may not be right yet, so I look at what the results really say.",
)
BY_TOOL: Mapping[str, tuple[str, ...]] = {
    "search": (
        "Wait, I should search again with a more precise query.",
        "The passages so far may not answer the question, so I look up what is missing.",
        "Maybe I searched for the wrong thing, so I try another query.",
    ),
    "python": (
        "Wait, I should check this with a short program.",
        "I may have made a mistake in the calculation, so I compute it with Python.",
        "I can verify this result by running code.",
    ),
    "calculator": ("Wait, I should compute this with the calculator.",),
}


def list_hints(tools: Collection[str], given: Sequence[str] = ()) -> tuple[str, ...]:
    """The hints for an environment: the given ones, or the built-in ones of its tools."""
    if given:
        return tuple(given)
    return (*GENERAL, *(hint for name in sorted(tools) for hint in BY_TOOL.get(name, ())))


def draw_hint(hints: Sequence[str], rng: random.Random) -> str:
    """One whole sentence."""
    return rng.choice(list(hints))
