"""Plans of an expert: which lookups and which computation answer a question of the world, and what to think.

A plan holds texts alone; an environment turns it into calls with real results. Every fact of a question is looked up
through an entity that is known by then: the question names it, or an earlier fact led to it. A passage is looked up
once, so a plan has as few calls as the question needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from recipes.world.config import Split
from recipes.world.questions import Question
from recipes.world.region import Entity, Fact, Region
from recipes.world.schema import RELATIONS
from recipes.world.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A search, and what it must find."""

    thought: str
    query: str
    evidence: tuple[str, ...]
    """Values that the results must contain for the plan to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """How the expert answers one question."""

    question: Question
    lookups: tuple[Lookup, ...]
    computation: str | None
    """An arithmetic expression whose value is the answer; None if the answer is stated or compared."""
    computation_thought: str
    conclusion: str
    """What to think before the answer."""

    @property
    def answer(self) -> str:
        return self.question.answer[0]


def iter_plans(world: World, split: Split) -> Iterator[ExpertPlan]:
    for region, question in world.iter_questions_by_region(split):
        yield build_plan(question, region)


def build_plan(question: Question, region: Region) -> ExpertPlan:
    known = {entity.entity_id for entity in region.entities.values() if entity.name in question.question}
    lookups: list[Lookup] = []
    learned = ""
    for fact in question.facts:
        subject = region.entities[fact.subject]
        is_forward = fact.subject in known
        known |= {fact.subject, *([] if fact.target is None else [fact.target])}
        query = subject.name if is_forward else f"{fact.relation.replace('_', ' ')} {fact.value}"
        evidence = str(fact.value) if is_forward else subject.name
        if any(each.query == query for each in lookups):
            lookups = [
                replace(each, evidence=(*each.evidence, evidence)) if each.query == query else each for each in lookups
            ]
        else:
            thought = f"{learned} I look up {query}.".strip()
            lookups.append(Lookup(thought=thought, query=query, evidence=(evidence,)))
            learned = ""
        learned = f"{learned} {state_fact(fact, subject)}".strip()
    computation = find_computation(question) if question.kind == "compute" else None
    final = f"The answer is {question.answer[0]}."
    return ExpertPlan(
        question=question,
        lookups=tuple(lookups),
        computation=computation,
        computation_thought=f"{learned} I compute {computation}." if computation else "",
        conclusion=final if computation else f"{learned} {final}",
    )


def state_fact(fact: Fact, subject: Entity) -> str:
    sentence = RELATIONS[fact.relation].statements[0].format(s=subject.name, v=fact.value)
    return sentence[0].upper() + sentence[1:]


def find_computation(question: Question) -> str:
    """The expression of the two last numbers whose value is the answer."""
    first, second = (int(fact.value) for fact in [each for each in question.facts if each.target is None][-2:])
    low, high = sorted((first, second))
    expected = int(question.answer[0])
    return f"{high} - {low}" if high - low == expected else f"{first} + {second}"
