"""Records: the facts of an entity as lines, `birthplace Old Leamoup`, in place of passages in prose.

A pocket-size model learns to read records in minutes, but hardly prose. A record begins with the name of its entity, so
that it is the first result of a search for that name.
"""

from __future__ import annotations

import random

from recipes.world.region import Entity, Fact

LABELS = {"birth_year": "born", "city_founded": "founded", "firm_founded": "opened", "work_year": "appeared"}
"""First words of lines where the name of the relation is not one word."""


def build_record(entity: Entity) -> dict[str, str]:
    """The record as a row of a search corpus."""
    return {"id": entity.entity_id, "title": entity.name, "text": write_record(entity)}


def write_result(entity: Entity) -> str:
    """What a search returns that finds the record: title and text."""
    return f"{entity.name}\n{write_record(entity)}"


def write_record(entity: Entity) -> str:
    """The name and the facts, in an order drawn for this entity."""
    facts = list(entity.facts.values())
    random.Random(f"{entity.entity_id} {entity.name}").shuffle(facts)
    return "\n".join([f"name {entity.name}", *map(state_fact, facts)])


def state_fact(fact: Fact) -> str:
    return f"{LABELS.get(fact.relation, fact.relation)} {fact.value}"
