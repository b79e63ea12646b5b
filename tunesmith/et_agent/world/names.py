"""Invented names from syllables, without collisions and without a list of the names given so far.

The stem of number n is the n-th element of a seeded permutation of all syllable strings of one length. A syllable is a
consonant cluster and a vowel cluster, so a string has one reading only, and different numbers have different stems. An
ending completes a stem: names of one stem with different endings are nearly identical.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

ONSETS = (
    "b", "br", "d", "dr", "f", "g", "gl", "h", "j", "k", "kr", "l", "m", "n", "p", "pr", "r", "s", "sk", "st",
    "t", "th", "tr", "v", "vr", "z",
)  # fmt: skip
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
ENDINGS = ("n", "r", "l", "s", "m", "x", "k", "d", "p", "g")
"""Single consonants: no name is the beginning of another one of the same length in syllables."""
NUM_SYLLABLES = len(ONSETS) * len(VOWELS)
STARTS = (
    "Al", "Be", "Cor", "Da", "El", "Fe", "Gar", "Hes", "Ji", "Ka", "Lor", "Mi", "Ne", "Or", "Pel", "Ru", "Sa", "Ti",
)  # fmt: skip
ENDS = ("bin", "dra", "fen", "la", "min", "nor", "ric", "sa", "tis", "vo")
FIRST_NAMES = tuple(start + end for start in STARTS for end in ENDS)
"""First names, which people share; only the last name belongs to one person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameModel:
    """A permutation of `space` stems: n is mapped to `(factor * n + shift) mod space`."""

    length: int
    """Syllables of a stem."""
    factor: int
    shift: int

    @property
    def space(self) -> int:
        return int(NUM_SYLLABLES**self.length)

    def build_name(self, number: int, *, ending: int = 0) -> str:
        """The name of stem `number`; endings 0 to 9 give different names, in an order that depends on the stem."""
        if not 0 <= number < self.space:
            raise ValueError(f"stem {number} is outside of the {self.space} stems of {self.length} syllables")
        rest = (self.factor * number + self.shift) % self.space
        first_ending = rest % len(ENDINGS)
        parts = []
        for _ in range(self.length):
            rest, digit = divmod(rest, NUM_SYLLABLES)
            parts.append(ONSETS[digit // len(VOWELS)] + VOWELS[digit % len(VOWELS)])
        return "".join(parts).capitalize() + ENDINGS[(first_ending + ending) % len(ENDINGS)]


def build_name_model(*, num_stems: int, seed: int) -> NameModel:
    """A permutation of the shortest stems of at least two syllables of which there are `num_stems`."""
    length = 2
    while NUM_SYLLABLES**length < num_stems:
        length += 1
    space = NUM_SYLLABLES**length
    rng = random.Random(f"{seed}/names")
    factor = rng.randrange(space // 4, space // 2) | 1
    while math.gcd(factor, space) > 1:
        factor += 2
    return NameModel(length=length, factor=factor, shift=rng.randrange(space))


def choose(rng: random.Random, options: Sequence[str]) -> str:
    """`rng.choice` for short tuples in inner loops."""
    return options[int(rng.random() * len(options))]
