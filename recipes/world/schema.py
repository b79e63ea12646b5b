"""The relations of the world and the sentences about them.

A relation gives a subject exactly one value: a number, a word, a name, or another entity. `statements` are sentences
of documents about the subject `{s}` and the value `{v}`. `questions` ask for the value; `phrase` and `inverse_phrase`
describe an entity through another one, `{x}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EntityKind = Literal["city", "person", "firm", "work"]
ValueKind = Literal["year", "count", "word", "name", "city", "person", "firm", "work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What holds between a subject and its one value."""

    name: str
    subject: EntityKind
    value: ValueKind
    passage: int = 0
    """Which of the subject's passages states it."""
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    phrase: str = ""
    """The value, described through the subject; empty if the value is no entity."""
    inverse_phrase: str = ""
    """The subject, described through the value; empty if the relation is not followed backwards."""
    inverse_question: str = ""


RELATIONS: Mapping[str, Relation] = {
    each.name: each
    for each in (
        Relation(
            name="city_founded",
            subject="city",
            value="year",
            statements=("{s} was founded in {v}.", "{s} dates from {v}.", "The charter of {s} is from {v}."),
            questions=("In which year was {x} founded?", "When was {x} founded?"),
        ),
        Relation(
            name="population",
            subject="city",
            value="count",
            statements=("{s} has {v} inhabitants.", "The population of {s} is {v}.", "{v} people live in {s}."),
            questions=("How many inhabitants does {x} have?", "What is the population of {x}?"),
        ),
        Relation(
            name="river",
            subject="city",
            value="name",
            statements=("{s} lies on the river {v}.", "The river {v} flows through {s}.", "{s} grew along the {v}."),
            questions=("On which river does {x} lie?", "Which river flows through {x}?"),
        ),
        Relation(
            name="mayor",
            subject="city",
            value="person",
            statements=("The mayor of {s} is {v}.", "{v} is the mayor of {s}.", "{s} is governed by its mayor {v}."),
            questions=("Who is the mayor of {x}?", "Which person is mayor of {x}?"),
            phrase="the mayor of {x}",
            inverse_phrase="the city whose mayor is {x}",
            inverse_question="Of which city is {x} the mayor?",
        ),
        Relation(
            name="birth_year",
            subject="person",
            value="year",
            statements=("{s} was born in {v}.", "{s} came into the world in {v}.", "The year of birth of {s} is {v}."),
            questions=("In which year was {x} born?", "What is the year of birth of {x}?"),
        ),
        Relation(
            name="birthplace",
            subject="person",
            value="city",
            statements=("{s} comes from {v}.", "The birthplace of {s} is {v}.", "{v} is where {s} was born."),
            questions=("In which city was {x} born?", "What is the birthplace of {x}?"),
            phrase="the city where {x} was born",
        ),
        Relation(
            name="occupation",
            subject="person",
            value="word",
            statements=("{s} is a {v} by profession.", "{s} trained as a {v}.", "By profession {s} is a {v}."),
            questions=("What is the profession of {x}?", "As what did {x} train?"),
        ),
        Relation(
            name="employer",
            subject="person",
            value="firm",
            passage=1,
            statements=("{s} works for {v}.", "The employer of {s} is {v}.", "{v} employs {s}."),
            questions=("For which firm does {x} work?", "Which firm employs {x}?"),
            phrase="the firm that employs {x}",
        ),
        Relation(
            name="residence",
            subject="person",
            value="city",
            passage=1,
            statements=("{s} lives in {v}.", "{s} has a house in {v}.", "The home of {s} is in {v}."),
            questions=("In which city does {x} live?", "Where does {x} live?"),
            phrase="the city where {x} lives",
        ),
        Relation(
            name="mentor",
            subject="person",
            value="person",
            passage=1,
            statements=("{s} was taught by {v}.", "{v} was the teacher of {s}.", "The teacher of {s} was {v}."),
            questions=("Who was the teacher of {x}?", "Who taught {x}?"),
            phrase="the teacher of {x}",
        ),
        Relation(
            name="founder",
            subject="firm",
            value="person",
            statements=("{s} was founded by {v}.", "The founder of {s} is {v}.", "{v} founded {s}."),
            questions=("Who founded {x}?", "Who is the founder of {x}?"),
            phrase="the founder of {x}",
            inverse_phrase="the firm founded by {x}",
            inverse_question="Which firm did {x} found?",
        ),
        Relation(
            name="firm_founded",
            subject="firm",
            value="year",
            statements=("{s} was established in {v}.", "{s} opened in {v}.", "The business of {s} began in {v}."),
            questions=("In which year was {x} established?", "When was {x} established?"),
        ),
        Relation(
            name="headquarters",
            subject="firm",
            value="city",
            passage=1,
            statements=(
                "{s} has its headquarters in {v}.",
                "The head office of {s} is in {v}.",
                "{s} is based in {v}.",
            ),
            questions=("In which city does {x} have its headquarters?", "Where is the head office of {x}?"),
            phrase="the city where {x} is based",
        ),
        Relation(
            name="product",
            subject="firm",
            value="word",
            passage=1,
            statements=("{s} makes {v}.", "The main product of {s} is {v}.", "{s} is known for its {v}."),
            questions=("What does {x} make?", "What is the main product of {x}?"),
        ),
        Relation(
            name="employees",
            subject="firm",
            value="count",
            passage=1,
            statements=("{s} has {v} employees.", "{v} people work at {s}.", "The staff of {s} numbers {v}."),
            questions=("How many employees does {x} have?", "How many people work at {x}?"),
        ),
        Relation(
            name="author",
            subject="work",
            value="person",
            statements=("{s} was written by {v}.", "The author of {s} is {v}.", "{v} wrote {s}."),
            questions=("Who wrote {x}?", "Who is the author of {x}?"),
            phrase="the author of {x}",
            inverse_phrase="the work written by {x}",
            inverse_question="Which work did {x} write?",
        ),
        Relation(
            name="publisher",
            subject="work",
            value="firm",
            statements=("{s} was printed by {v}.", "{v} is the publisher of {s}.", "{v} brought out {s}."),
            questions=("Which firm published {x}?", "Who is the publisher of {x}?"),
            phrase="the publisher of {x}",
        ),
        Relation(
            name="work_year",
            subject="work",
            value="year",
            statements=(
                "{s} appeared in {v}.",
                "{s} was first published in {v}.",
                "The first edition of {s} is from {v}.",
            ),
            questions=("In which year did {x} appear?", "When was {x} first published?"),
        ),
        Relation(
            name="genre",
            subject="work",
            value="word",
            statements=("{s} is a {v}.", "In form {s} is a {v}.", "{s} is read as a {v}."),
            questions=("What kind of work is {x}?", "Which literary form does {x} have?"),
        ),
    )
}
OCCUPATIONS = (
    "baker", "carpenter", "chemist", "clerk", "doctor", "gardener", "jeweller", "lawyer", "miller", "painter",
    "pilot", "sailor",
)  # fmt: skip
PRODUCTS = (
    "bells", "boots", "candles", "carpets", "clocks", "glass", "knives", "lamps", "paper", "ropes", "tiles",
    "wagons",
)  # fmt: skip
GENRES = (
    "ballad", "biography", "comedy", "dialogue", "fable", "legend", "memoir", "novel", "poem", "saga", "satire",
    "tragedy",
)  # fmt: skip

PASSAGES: Mapping[EntityKind, tuple[tuple[str, ...], ...]] = {
    kind: tuple(
        tuple(each.name for each in RELATIONS.values() if each.subject == kind and each.passage == number)
        for number in range(2 if kind in ("person", "firm") else 1)
    )
    for kind in ("city", "person", "firm", "work")
}
"""Relations that each passage about an entity states."""
OPENINGS: Mapping[EntityKind, tuple[str, ...]] = {
    "city": ("{name}, or {alias} for short, is a city.", "{name} is a city.", "{name} ({alias}) is a city."),
    "person": ("This is about {name}.", "{name} signs letters as {alias}.", "{name} ({alias}) is still remembered."),
    "firm": ("{name} is a firm.", "{name}, or {alias}, is a firm.", "{name} trades as {alias}."),
    "work": ("{name} is a book.", "{name}, also called {alias}, is a book.", "Some editions of {name} say {alias}."),
}
REFERENCES: Mapping[EntityKind, tuple[str, ...]] = {
    "city": ("the city", "this city", "{name}"),
    "person": ("{name}", "{alias}"),
    "firm": ("the firm", "the company", "{name}"),
    "work": ("the book", "this book", "{name}"),
}
"""How sentences after the first one refer to the subject."""
