"""Questions with one answer: chains of facts, comparisons and computations over the facts of one region.

An entity is named or described by a chain of relations ("the founder of the publisher of ..."). A relation is followed
backwards only where exactly one subject, distractors included, has that value. A chain visits no entity twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recipes.world.config import QuestionKind, Split
from recipes.world.region import Entity, Fact, Region
from recipes.world.schema import RELATIONS

MAX_ATTEMPTS = 150
"""Draws of one form of question before another form is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row of the data set."""

    question: str
    answer: tuple[str, ...]
    """Accepted answers, the gold one first."""
    kind: QuestionKind
    hops: int
    """Facts in the longest chain of the question."""
    facts: tuple[Fact, ...]
    """The facts from which the answer follows, in the order of the chains."""
    passages: tuple[str, ...]
    """Ids of the documents that state the facts."""
    entities: tuple[str, ...]
    """Ids of all entities that the question names, passes, or has as its answer."""
    split: Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An entity, how the question describes it, and the facts that the description uses."""

    entity: Entity
    phrase: str
    facts: tuple[Fact, ...] = ()
    path: tuple[str, ...]
    """Entity ids from the named entity to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Which of two entities has the lower or the higher value, and whether it is the first one."""

    relation: str
    lower: str
    higher: str
    is_lower: str
    """Yes-or-no question whether the first entity has the lower value."""


COMPARISONS = (
    Comparison(
        relation="birth_year",
        lower="Who was born earlier, {a} or {b}?",
        higher="Who was born later, {a} or {b}?",
        is_lower="Was {a} born before {b}?",
    ),
    Comparison(
        relation="city_founded",
        lower="Which city is older, {a} or {b}?",
        higher="Which city was founded later, {a} or {b}?",
        is_lower="Was {a} founded before {b}?",
    ),
    Comparison(
        relation="population",
        lower="Which city has fewer inhabitants, {a} or {b}?",
        higher="Which city is larger by population, {a} or {b}?",
        is_lower="Does {a} have fewer inhabitants than {b}?",
    ),
    Comparison(
        relation="firm_founded",
        lower="Which firm was established first, {a} or {b}?",
        higher="Which firm is younger, {a} or {b}?",
        is_lower="Was {a} established before {b}?",
    ),
    Comparison(
        relation="employees",
        lower="Which firm has fewer employees, {a} or {b}?",
        higher="Which firm has more employees, {a} or {b}?",
        is_lower="Does {a} have fewer employees than {b}?",
    ),
    Comparison(
        relation="work_year",
        lower="Which work appeared first, {a} or {b}?",
        higher="Which work appeared later, {a} or {b}?",
        is_lower="Did {a} appear before {b}?",
    ),
)
EQUALITIES: Mapping[str, str] = {
    "birthplace": "Were {a} and {b} born in the same city?",
    "residence": "Do {a} and {b} live in the same city?",
    "employer": "Do {a} and {b} work for the same firm?",
    "headquarters": "Are {a} and {b} based in the same city?",
    "publisher": "Do {a} and {b} have the same publisher?",
    "genre": "Are {a} and {b} of the same kind?",
}
EVENTS: Mapping[str, str] = {
    "birth_year": "the birth of {x}",
    "city_founded": "the founding of {x}",
    "firm_founded": "the opening of {x}",
    "work_year": "the publication of {x}",
}
SUMS: Mapping[str, str] = {
    "population": "How many inhabitants do {a} and {b} have together?",
    "employees": "How many employees do {a} and {b} have together?",
}
DIFFERENCES: Mapping[str, str] = {
    "population": "How many more inhabitants does {a} have than {b}?",
    "employees": "How many more employees does {a} have than {b}?",
}
AGES: Mapping[str, str] = {
    "firm_founded": "How old did {a} turn in the year in which {b} was established?",
    "work_year": "How old did {a} turn in the year in which {b} appeared?",
}


class QuestionWriter:
    """Draws the questions of one region; every text at most once. `passage_ids` has the document of each fact."""

    def __init__(
        self,
        region: Region,
        *,
        passage_ids: Mapping[Fact, str],
        split: Split,
        min_hops: int,
        max_hops: int,
        rng: random.Random,
    ) -> None:
        self.split, self.rng, self.passage_ids = split, rng, passage_ids
        self.min_hops, self.max_hops = min_hops, max_hops
        self.entities, self.originals = region.entities, region.originals
        self.subjects: dict[tuple[str, str], list[Entity]] = {}
        for entity in region.entities.values():
            for fact in entity.facts.values():
                if fact.target is not None:
                    self.subjects.setdefault((fact.relation, fact.target), []).append(entity)
        self.texts: set[str] = set()
        self.is_yes_next: dict[str, bool] = {}
        """Answer of the next question of a form; alternating, so that no form favors yes or no."""

    def draw(self, kind: QuestionKind) -> Question | None:
        """A new question of a kind, or None if the region has hardly any left."""
        forms: Mapping[QuestionKind, tuple[Callable[[int, bool], Question | None], ...]] = {
            "multi_hop": (self._draw_chain,),
            "comparison": (self._draw_comparison, self._draw_order, self._draw_equality),
            "compute": (self._draw_years, self._draw_age, self._draw_sum, self._draw_difference),
        }
        for _ in range(20):
            hops = self.rng.randint(self.min_hops, self.max_hops)
            form = self.rng.choice(forms[kind])
            is_yes = self.is_yes_next.setdefault(form.__name__, self.rng.random() < 0.5)
            for _ in range(MAX_ATTEMPTS):
                question = form(hops, is_yes)
                if question is not None and question.question not in self.texts:
                    self.texts.add(question.question)
                    self.is_yes_next[form.__name__] = not is_yes
                    return question
        return None

    def _walk(self, num_steps: int) -> Operand | None:
        """A chain from a random entity; None where it ends early or returns."""
        entity = self.rng.choice(self.originals)
        operand = Operand(entity=entity, phrase=entity.name, path=(entity.entity_id,))
        for _ in range(num_steps):
            steps = self._list_steps(operand)
            if not steps:
                return None
            operand = self.rng.choice(steps)
        return operand

    def _list_steps(self, operand: Operand) -> list[Operand]:
        """What one more relation, followed in either direction, leads to."""
        steps = [
            self._step(operand, fact.target, RELATIONS[fact.relation].phrase, fact)
            for fact in operand.entity.facts.values()
            if fact.target is not None and fact.target not in operand.path
        ]
        for relation in RELATIONS.values():
            subjects = self.subjects.get((relation.name, operand.entity.entity_id), [])
            if relation.inverse_phrase and len(subjects) == 1 and subjects[0].entity_id not in operand.path:
                fact = subjects[0].facts[relation.name]
                steps.append(self._step(operand, fact.subject, relation.inverse_phrase, fact))
        return steps

    def _step(self, operand: Operand, target: str, phrase: str, fact: Fact) -> Operand:
        return Operand(
            entity=self.entities[target],
            phrase=phrase.format(x=operand.phrase),
            facts=(*operand.facts, fact),
            path=(*operand.path, target),
        )

    def _draw_chain(self, hops: int, is_yes: bool) -> Question | None:
        operand = self._walk(hops - 1)
        if operand is None:
            return None
        relation = RELATIONS[self.rng.choice(list(RELATIONS))]
        if relation.subject == operand.entity.kind and relation.name in operand.entity.facts:
            fact = operand.entity.facts[relation.name]
            if fact.target in operand.path:
                return None
            text = self.rng.choice(relation.questions)
            return self._build(text.format(x=operand.phrase), "multi_hop", (operand,), (fact,), self._accept(fact))
        subjects = self.subjects.get((relation.name, operand.entity.entity_id), [])
        if not relation.inverse_question or len(subjects) != 1 or subjects[0].entity_id in operand.path:
            return None
        fact = subjects[0].facts[relation.name]
        text = relation.inverse_question.format(x=operand.phrase)
        return self._build(text, "multi_hop", (operand,), (fact,), name_entity(subjects[0]))

    def _draw_pair(self, hops: int, *relations: str) -> tuple[Operand, Operand] | None:
        """Two different entities with these relations; one chain has `hops - 1` steps, the other at most as many."""
        steps = [hops - 1, self.rng.randint(0, hops - 1)]
        self.rng.shuffle(steps)
        first, second = map(self._walk, steps)
        if first is None or second is None or first.entity is second.entity:
            return None
        if relations[0] not in first.entity.facts or relations[-1] not in second.entity.facts:
            return None
        return first, second

    def _draw_separate_pair(self, hops: int, relation: str) -> tuple[Operand, Operand] | None:
        """A pair whose chains have no entity in common, so that no fact of one chain answers for the other."""
        pair = self._draw_pair(hops, relation)
        return pair if pair is not None and not set(pair[0].path) & set(pair[1].path) else None

    def _draw_comparison(self, hops: int, is_lower: bool) -> Question | None:
        comparison = self.rng.choice(COMPARISONS)
        pair = self._draw_separate_pair(hops, comparison.relation)
        if pair is None:
            return None
        facts = tuple(each.entity.facts[comparison.relation] for each in pair)
        if facts[0].value == facts[1].value:
            return None
        found = sorted(pair, key=lambda each: int(each.entity.facts[comparison.relation].value))[0 if is_lower else 1]
        text = (comparison.lower if is_lower else comparison.higher).format(a=pair[0].phrase, b=pair[1].phrase)
        return self._build(text, "comparison", pair, facts, name_entity(found.entity))

    def _draw_order(self, hops: int, is_yes: bool) -> Question | None:
        comparison = self.rng.choice(COMPARISONS)
        pair = self._draw_separate_pair(hops, comparison.relation)
        if pair is None:
            return None
        facts = tuple(each.entity.facts[comparison.relation] for each in pair)
        low, high = (int(fact.value) for fact in facts)
        if low == high or (low < high) != is_yes:
            return None
        text = comparison.is_lower.format(a=pair[0].phrase, b=pair[1].phrase)
        return self._build(text, "comparison", pair, facts, ("yes" if is_yes else "no",))

    def _draw_equality(self, hops: int, is_yes: bool) -> Question | None:
        relation = self.rng.choice(list(EQUALITIES))
        pair = self._draw_separate_pair(hops, relation)
        if pair is None:
            return None
        facts = tuple(each.entity.facts[relation] for each in pair)
        if (facts[0].value == facts[1].value) != is_yes or {fact.target for fact in facts} & {
            *pair[0].path,
            *pair[1].path,
        }:
            return None
        text = EQUALITIES[relation].format(a=pair[0].phrase, b=pair[1].phrase)
        return self._build(text, "comparison", pair, facts, ("yes" if is_yes else "no",))

    def _draw_years(self, hops: int, is_yes: bool) -> Question | None:
        relations = self.rng.choice(list(EVENTS)), self.rng.choice(list(EVENTS))
        pair = self._draw_pair(hops, *relations)
        if pair is None:
            return None
        facts = tuple(each.entity.facts[name] for each, name in zip(pair, relations, strict=True))
        number = abs(int(facts[0].value) - int(facts[1].value))
        first, second = (EVENTS[name].format(x=each.phrase) for each, name in zip(pair, relations, strict=True))
        text = f"How many years lie between {first} and {second}?"
        return self._build(text, "compute", pair, facts, (*write_number(number), f"{number} years")) if number else None

    def _draw_age(self, hops: int, is_yes: bool) -> Question | None:
        event = self.rng.choice(list(AGES))
        pair = self._draw_pair(hops, "birth_year", event)
        if pair is None:
            return None
        facts = (pair[0].entity.facts["birth_year"], pair[1].entity.facts[event])
        age = int(facts[1].value) - int(facts[0].value)
        text = AGES[event].format(a=pair[0].phrase, b=pair[1].phrase)
        return self._build(text, "compute", pair, facts, (*write_number(age), f"{age} years")) if age > 0 else None

    def _draw_sum(self, hops: int, is_yes: bool) -> Question | None:
        relation = self.rng.choice(list(SUMS))
        pair = self._draw_pair(hops, relation)
        if pair is None:
            return None
        facts = tuple(each.entity.facts[relation] for each in pair)
        text = SUMS[relation].format(a=pair[0].phrase, b=pair[1].phrase)
        return self._build(text, "compute", pair, facts, write_number(sum(int(fact.value) for fact in facts)))

    def _draw_difference(self, hops: int, is_yes: bool) -> Question | None:
        relation = self.rng.choice(list(DIFFERENCES))
        pair = self._draw_pair(hops, relation)
        if pair is None:
            return None
        facts = tuple(each.entity.facts[relation] for each in pair)
        number = int(facts[0].value) - int(facts[1].value)
        text = DIFFERENCES[relation].format(a=pair[0].phrase, b=pair[1].phrase)
        return self._build(text, "compute", pair, facts, write_number(number)) if number > 0 else None

    def _accept(self, fact: Fact) -> tuple[str, ...]:
        if fact.target is not None:
            return name_entity(self.entities[fact.target])
        return write_number(fact.value) if RELATIONS[fact.relation].value == "count" else (str(fact.value),)

    def _build(
        self,
        text: str,
        kind: QuestionKind,
        operands: tuple[Operand, ...],
        facts: tuple[Fact, ...],
        answer: tuple[str, ...],
    ) -> Question:
        ids = [each for operand in operands for each in operand.path]
        ids += [each for fact in facts for each in (fact.subject, fact.target) if each is not None]
        used = tuple(dict.fromkeys([*(fact for operand in operands for fact in operand.facts), *facts]))
        return Question(
            question=text,
            answer=answer,
            kind=kind,
            hops=1 + max(len(operand.facts) for operand in operands),
            facts=used,
            passages=tuple(dict.fromkeys(self.passage_ids[fact] for fact in used)),
            entities=tuple(dict.fromkeys(ids)),
            split=self.split,
        )


def name_entity(entity: Entity) -> tuple[str, ...]:
    return (entity.name, *entity.aliases)


def write_number(number: int | str) -> tuple[str, ...]:
    """A number in digits, and with separators of thousands where they make a difference."""
    return tuple(dict.fromkeys([str(number), f"{int(number):,}"]))
