"""Documents: short passages that state two to four facts of an entity, and irrelevant ones about nothing else.

The wording is drawn from (seed, region), so the passages of a region can be rebuilt alone. A sentence that is not about
the entity of the title does not occur: each fact is stated in one passage only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tunesmith.et_agent.world.names import NameModel, choose
from tunesmith.et_agent.world.region import Entity, Fact, Region
from tunesmith.et_agent.world.schema import OPENINGS, PASSAGES, REFERENCES, RELATIONS

IRRELEVANT = (
    ("{name} moss", "{name} moss grows on {place}. It turns {colour} in {season}."),
    ("{name} stone", "{name} stone is found under {place}. Polished it looks {colour}."),
    ("{name} moth", "The {name} moth flies over {place} in {season}. Its wings are {colour}."),
    ("{name} soup", "{name} soup is a {colour} dish for {season}. Herbs from {place} go into it."),
    ("{name} knot", "The {name} knot ties {colour} cloth. It was first seen near {place} in {season}."),
)
PLACES = ("old walls", "wet meadows", "gravel banks", "tall pines", "salt marshes", "quiet ponds")
COLOURS = ("amber", "black", "blue", "brown", "crimson", "green", "grey", "white", "yellow")
SEASONS = ("spring", "early summer", "late summer", "autumn", "winter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One passage of the knowledge base."""

    document_id: str
    title: str
    text: str
    facts: tuple[Fact, ...]
    """What the text states; empty for an irrelevant passage."""


def write_passages(region: Region, *, seed: int, num_wordings: int) -> Iterator[tuple[Entity, list[Fact], str]]:
    """All passages of a region with their entity and facts, in a random order."""
    rng = random.Random(f"{seed}/wording/{region.number}")
    passages = [
        (entity, [entity.facts[name] for name in relations if name in entity.facts])
        for entity in region.entities.values()
        for relations in PASSAGES[entity.kind]
    ]
    rng.shuffle(passages)
    for entity, facts in passages:
        rng.shuffle(facts)
        yield entity, facts, write_passage(entity, facts, num_wordings=num_wordings, rng=rng)


def write_passage(entity: Entity, facts: list[Fact], *, num_wordings: int, rng: random.Random) -> str:
    """An opening with the name, then a sentence for each fact."""
    alias = entity.aliases[0]
    sentences = [choose(rng, OPENINGS[entity.kind]).format(name=entity.name, alias=alias)]
    for fact in facts:
        subject = choose(rng, REFERENCES[entity.kind]).format(name=entity.name, alias=alias)
        text = choose(rng, RELATIONS[fact.relation].statements[:num_wordings]).format(s=subject, v=fact.value)
        sentences.append(text[0].upper() + text[1:])
    return " ".join(sentences)


def write_irrelevant(number: int, *, stem: int, seed: int, names: NameModel) -> Document:
    """A passage about an invented plant, stone, animal, dish or knot."""
    rng = random.Random(f"{seed}/irrelevant/{number}")
    title, text = rng.choice(IRRELEVANT)
    words = {
        "name": names.build_name(stem),
        "place": rng.choice(PLACES),
        "colour": rng.choice(COLOURS),
        "season": rng.choice(SEASONS),
    }
    return Document(document_id=f"d{number}", title=title.format(**words), text=text.format(**words), facts=())
