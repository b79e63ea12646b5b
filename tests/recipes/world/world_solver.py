"""Reads facts from the texts of a world's documents and answers questions from them by brute force.

It shares the templates of the wording with the generator and nothing else: no entity, no fact, no chain. A description
stands for every entity that fits it, so an ambiguous question has several answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from recipes.world.questions import AGES, COMPARISONS, DIFFERENCES, EQUALITIES, EVENTS, SUMS
from recipes.world.region import TOWNS, TRADES
from recipes.world.schema import REFERENCES, RELATIONS

Triple = tuple[str, str, str]


def find_kind(name: str) -> str:
    words = name.split()
    if words[0] == "The":
        return "work"
    if words[-1] in TRADES:
        return "firm"
    return "city" if words[0] in TOWNS else "person"


def build_alias(name: str) -> str:
    """The alias that documents use."""
    first, *rest = name.split()
    match find_kind(name):
        case "work":
            return f"The {rest[1]} of {rest[0]}"
        case "firm":
            return first
        case "city":
            return rest[0]
    return f"{first[0]}. {rest[0]}"


def read_facts(title: str, text: str) -> list[Triple]:
    """The facts of a passage about an entity; every sentence but the first states exactly one."""
    kind, alias = find_kind(title), build_alias(title)
    sentences = re.split(r"(?<=[a-z0-9])\. ", text)
    facts = []
    for sentence in sentences[1:]:
        plain = sentence.removesuffix(".") + "."
        found = set()
        for reference in REFERENCES[kind]:
            subject = reference.format(name=title, alias=alias)
            for relation in RELATIONS.values():
                for statement in relation.statements if relation.subject == kind else ():
                    template = statement.replace("{s}", subject).replace("{v}", "{x}")
                    template = template[0].upper() + template[1:]
                    found |= {(title, relation.name, value) for value in match_one(template, plain)}
        assert len(found) == 1, f"{title}: {plain!r} states {found}"
        facts += found
    return facts


class Solver:
    """Answers questions from triples."""

    def __init__(self, triples: Iterable[Triple]) -> None:
        self.values: dict[tuple[str, str], set[str]] = {}
        self.subjects: dict[tuple[str, str], set[str]] = {}
        for subject, relation, value in triples:
            self.values.setdefault((subject, relation), set()).add(value)
            self.subjects.setdefault((value, relation), set()).add(subject)
        self.names = {subject for subject, _ in self.values} | {value for value, _ in self.subjects}

    def resolve(self, phrase: str) -> set[str]:
        """Every entity that a description fits."""
        found = {phrase} & self.names
        for relation in RELATIONS.values():
            for inner in match_one(relation.phrase, phrase):
                found |= self.follow(inner, relation.name)
            for inner in match_one(relation.inverse_phrase, phrase):
                found |= self.follow_back(inner, relation.name)
        return found

    def follow(self, phrase: str, relation: str) -> set[str]:
        return {value for name in self.resolve(phrase) for value in self.values.get((name, relation), ())}

    def follow_back(self, phrase: str, relation: str) -> set[str]:
        return {subject for name in self.resolve(phrase) for subject in self.subjects.get((name, relation), ())}

    def answer(self, question: str) -> set[str]:
        """Every answer that some reading of the question has."""
        return {*self.answer_chain(question), *self.answer_pair(question), *self.answer_years(question)}

    def answer_chain(self, question: str) -> Iterator[str]:
        for relation in RELATIONS.values():
            for template in relation.questions:
                for phrase in match_one(template, question):
                    yield from self.follow(phrase, relation.name)
            for phrase in match_one(relation.inverse_question, question):
                yield from self.follow_back(phrase, relation.name)

    def answer_pair(self, question: str) -> Iterator[str]:
        for each in COMPARISONS:
            for _, _, first, second in self.read_pairs(each.is_lower, question, each.relation):
                yield "yes" if int(first) < int(second) else "no"
            for a, b, first, second in self.read_pairs(each.lower, question, each.relation):
                yield a if int(first) < int(second) else b
            for a, b, first, second in self.read_pairs(each.higher, question, each.relation):
                yield a if int(first) > int(second) else b
        for relation, template in EQUALITIES.items():
            for _, _, first, second in self.read_pairs(template, question, relation):
                yield "yes" if first == second else "no"
        for relation, template in SUMS.items():
            for _, _, first, second in self.read_pairs(template, question, relation):
                yield str(int(first) + int(second))
        for relation, template in DIFFERENCES.items():
            for _, _, first, second in self.read_pairs(template, question, relation):
                yield str(int(first) - int(second))
        for relation, template in AGES.items():
            for _, _, first, second in self.read_pairs(template, question, "birth_year", relation):
                yield str(int(second) - int(first))

    def answer_years(self, question: str) -> Iterator[str]:
        for one, first_event in EVENTS.items():
            for other, second_event in EVENTS.items():
                first, second = first_event.replace("{x}", "{a}"), second_event.replace("{x}", "{b}")
                template = f"How many years lie between {first} and {second}?"
                for _, _, start, end in self.read_pairs(template, question, one, other):
                    yield str(abs(int(start) - int(end)))

    def read_pairs(self, template: str, question: str, *relations: str) -> Iterator[tuple[str, str, str, str]]:
        """Both entities and their values, for every way to cut the question into two descriptions."""
        for phrases in match_pair(template, question):
            for a in self.resolve(phrases["a"]):
                for b in self.resolve(phrases["b"]):
                    for first in self.values.get((a, relations[0]), ()):
                        for second in self.values.get((b, relations[-1]), ()):
                            yield a, b, first, second


def match_one(template: str, text: str) -> list[str]:
    """What `{x}` of the template stands for; no item if the text does not fit."""
    before, mark, after = template.partition("{x}")
    fits = mark and text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after)
    return [text[len(before) : len(text) - len(after)]] if fits else []


def match_pair(template: str, text: str) -> Iterator[Mapping[str, str]]:
    before, rest = template.split("{a}")
    between, after = rest.split("{b}")
    if not text.startswith(before) or not text.endswith(after):
        return
    inner = text[len(before) : len(text) - len(after)]
    for match in re.finditer(f"(?={re.escape(between)})", inner):
        yield {"a": inner[: match.start()], "b": inner[match.start() + len(between) :]}
