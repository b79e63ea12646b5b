"""Entities and facts of one region of the world, a function of (seed, region number).

The world consists of regions of 24 entities (4 cities, 8 people, 4 firms, 8 works) with their distractors. References
stay inside a region, so regions without common entities separate train from test, and any region can be rebuilt alone.
A distractor has the name of its original but for one letter, the same relations, and another value for each of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipes.world.schema import GENRES, OCCUPATIONS, PRODUCTS, RELATIONS, EntityKind

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
    """Invented names without collisions: a permutation of `space` stems, n -> `(factor * n + shift) mod space`.

    A stem is a string of syllables, each a consonant and a vowel cluster, so different numbers have different stems.
    Names of one stem with different endings are nearly identical.
    """

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


ENTITIES: tuple[EntityKind, ...] = ("city",) * 4 + ("person",) * 8 + ("firm",) * 4 + ("work",) * 8
SLOTS: Mapping[EntityKind, range] = {
    "city": range(4),
    "person": range(4, 12),
    "firm": range(12, 16),
    "work": range(16, 24),
}
FOUNDERS = range(4, 8)
"""The people who found the firms are of the older half, so that everybody can work for any firm."""
NUM_STEMS = len(ENTITIES) + len(SLOTS["city"])
"""Stems of a region: entities and rivers; distractors take other endings of the same stems."""
TITLES = (
    "Anchor", "Bridge", "Crown", "Feather", "Garden", "Harbour", "Key", "Lantern", "Mirror", "Orchard", "Tower",
    "Voyage",
)  # fmt: skip
TRADES = ("Brothers", "Company", "Foundry", "House", "Mills", "Press", "Stores", "Union", "Works", "Yard")
TOWNS = ("Fort", "High", "Lake", "Lower", "New", "Old", "Port", "Upper", "West")
Values = dict[str, str | int]
"""What the relations of an entity give it: a number, a word, a name, or a reference as a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """The one value that a relation gives its subject."""

    subject: str
    """Entity id."""
    relation: str
    value: str | int
    """A number, a word, or a name; the name of the entity where the value is one."""
    target: str | None = None
    """Id of the entity that is the value, if it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """A city, person, firm or work with its facts by relation."""

    entity_id: str
    kind: EntityKind
    name: str
    aliases: tuple[str, ...]
    original: str | None
    """Id of the entity that this one is a distractor of."""
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """All entities of a region; the first 24 are those that questions are about."""

    number: int
    entities: Mapping[str, Entity]

    @property
    def originals(self) -> list[Entity]:
        return list(self.entities.values())[: len(ENTITIES)]


def build_region(number: int, *, seed: int, names: NameModel, num_distractors: int) -> Region:
    """The entities of a region, originals first, then their distractors by level."""
    rng = random.Random(f"{seed}/region/{number}")
    first_stem = number * NUM_STEMS
    called = [_draw_names(rng, kind, first_stem + slot, names, num_distractors) for slot, kind in enumerate(ENTITIES)]
    levels: list[list[Values]] = []
    for level in range(1 + num_distractors):
        rivers = [names.build_name(first_stem + len(ENTITIES) + city, ending=level) for city in SLOTS["city"]]
        drawer = ValueDrawer(rng=rng, level=level, original=levels[0] if levels else None)
        levels.append(_draw_values(drawer, rivers=rivers))
    entities: dict[str, Entity] = {}
    for level, drawn in enumerate(levels):
        for slot, kind in enumerate(ENTITIES):
            entity_id = _name_id(number, slot, level)
            facts = {}
            for relation, value in drawn[slot].items():
                target = None
                if RELATIONS[relation].value in SLOTS:
                    target_level, target_slot = divmod(int(value), len(ENTITIES))
                    target, value = _name_id(number, target_slot, target_level), called[target_slot][target_level][0]
                facts[relation] = Fact(subject=entity_id, relation=relation, value=value, target=target)
            name, *aliases = called[slot][level]
            original = _name_id(number, slot, 0) if level else None
            entities[entity_id] = Entity(
                entity_id=entity_id, kind=kind, name=name, aliases=tuple(aliases), original=original, facts=facts
            )
    return Region(number=number, entities=entities)


def _name_id(number: int, slot: int, level: int) -> str:
    return f"r{number}/{ENTITIES[slot]}{slot}" + (f"~{level}" if level else "")


def _draw_names(
    rng: random.Random, kind: EntityKind, stem: int, names: NameModel, num_distractors: int
) -> list[tuple[str, ...]]:
    """Name and aliases of an entity and of its distractors, which differ in the last letter of the invented word."""
    words = [names.build_name(stem, ending=level) for level in range(1 + num_distractors)]
    match kind:
        case "city":
            first = choose(rng, TOWNS)
            return [(f"{first} {word}", word) for word in words]
        case "person":
            first = choose(rng, FIRST_NAMES)
            return [(f"{first} {word}", f"{first[0]}. {word}", word) for word in words]
        case "firm":
            last = choose(rng, TRADES)
            return [(f"{word} {last}", word) for word in words]
        case "work":
            last = choose(rng, TITLES)
            return [(f"The {word} {last}", f"The {last} of {word}") for word in words]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDrawer:
    """Draws the values of the entities of one level; those of distractors differ from those of their originals."""

    rng: random.Random
    level: int
    original: list[Values] | None

    @property
    def base(self) -> int:
        """A reference is `level * 24 + slot`; this is the first one of the level."""
        return len(ENTITIES) * self.level

    def is_new(self, slot: int, relation: str, value: str | int) -> bool:
        return self.original is None or self.original[slot].get(relation) != value

    def draw_number(self, slot: int, relation: str, low: int, high: int) -> int:
        value = self.rng.randint(low, high)
        while not self.is_new(slot, relation, value):
            value = self.rng.randint(low, high)
        return value

    def draw_word(self, slot: int, relation: str, words: tuple[str, ...]) -> str:
        return choose(self.rng, [word for word in words if self.is_new(slot, relation, word)])

    def draw_place(self, slot: int, relation: str, kind: EntityKind) -> int:
        """A city or firm of the originals or of this level."""
        places = [base + each for base in sorted({0, self.base}) for each in SLOTS[kind]]
        return self.rng.choice([place for place in places if self.is_new(slot, relation, place)])


def _draw_values(draw: ValueDrawer, *, rivers: list[str]) -> list[Values]:
    """Values of all relations for each slot.

    Distractors refer to people of their own level only: who founds, writes or governs an original has no relation to a
    distractor, so that the relation can be followed backwards.
    """
    drawn: list[Values] = [{} for _ in ENTITIES]
    mayors = draw.rng.sample(SLOTS["person"], len(SLOTS["city"]))
    for slot, mayor, river in zip(SLOTS["city"], mayors, rivers, strict=True):
        drawn[slot] = {
            "city_founded": draw.draw_number(slot, "city_founded", 1100, 1650),
            "population": draw.draw_number(slot, "population", 2_000, 90_000),
            "river": river,
            "mayor": draw.base + mayor,
        }
    for slot in SLOTS["person"]:
        drawn[slot] = _draw_person(draw, slot)
    for slot, founder in zip(SLOTS["firm"], draw.rng.sample(FOUNDERS, len(SLOTS["firm"])), strict=True):
        year = int(drawn[founder]["birth_year"])
        drawn[slot] = {
            "founder": draw.base + founder,
            "firm_founded": draw.draw_number(slot, "firm_founded", year + 22, year + 35),
            "headquarters": draw.draw_place(slot, "headquarters", "city"),
            "product": draw.draw_word(slot, "product", PRODUCTS),
            "employees": draw.draw_number(slot, "employees", 12, 900),
        }
    for slot in SLOTS["work"]:
        drawn[slot] = {
            "author": draw.base + draw.rng.choice(SLOTS["person"]),
            "publisher": draw.draw_place(slot, "publisher", "firm"),
            "work_year": draw.draw_number(slot, "work_year", 1787, 1805),
            "genre": draw.draw_word(slot, "genre", GENRES),
        }
    return drawn


def _draw_person(draw: ValueDrawer, slot: int) -> Values:
    is_older = slot in FOUNDERS
    values: Values = {
        "birth_year": draw.draw_number(slot, "birth_year", 1720 if is_older else 1741, 1740 if is_older else 1765),
        "birthplace": draw.draw_place(slot, "birthplace", "city"),
        "occupation": draw.draw_word(slot, "occupation", OCCUPATIONS),
        "employer": draw.draw_place(slot, "employer", "firm"),
        "residence": draw.draw_place(slot, "residence", "city"),
    }
    if not is_older:
        values["mentor"] = draw.base + draw.rng.choice(FOUNDERS)
    return values
