"""Generator of arithmetic word problems, the training data of the pocket model.

A problem is a template filled with a name, a thing and whole numbers up to 999; its expression has one to three
operations and every intermediate result is a non-negative whole number. A hash of the question decides whether it is
held out, so train and test sets are disjoint for all seeds and sizes.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tunesmith.tasks.load import write_rows

Split = Literal["train", "test"]

NAMES = ("Tom", "Ann", "Bob", "Eve", "Sam", "Mia", "Leo", "Zoe", "Max", "Ivy")
THINGS = ("apples", "pens", "books", "coins", "cards", "shells", "eggs", "cups", "stamps", "balls")
HELD_OUT_RATIO = 8
"""One question in `HELD_OUT_RATIO` is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row of the data set."""

    question: str
    answer: str
    expression: str
    num_operations: int


RANGES = {"L": (100, 999), "M": (10, 99), "S": (2, 9)}
TEMPLATES = (
    ("MS", "{a} + {b}", "{name} has {a} {thing}, wins {b}. How many in the end?"),
    ("MS", "{a} - {b}", "{name} had {a} {thing}, lost {b}. How many remain?"),
    ("SM", "{a} * {b}", "{name} fills {a} shelves, each with {b} {thing}. How many in all?"),
    ("MS", "{a} / {b}", "{name} packs {a} {thing} in bags of {b}. How many bags?"),
    ("MSS", "{a} + {b} * {c}", "{name} has {a} {thing} and buys {b} bags of {c}. How many in the end?"),
    ("LMS", "{a} - {b} - {c}", "{name} had {a} {thing}, lost {b} and sold {c}. How many remain?"),
    ("MSS", "({a} + {b}) / {c}", "{name} packs {a} red and {b} blue {thing} in bags of {c}. How many bags?"),
    ("SMS", "{a} * ({b} + {c})", "{name} fills {a} shelves, each with {b} red and {c} blue {thing}. How many in all?"),
    ("MSSS", "{a} * {b} + {c} * {d}",
     "{name} sells {a} {thing} for {b} dollars each and {c} at {d} dollars. How much money?"),
    ("LSSS", "{a} + {b} - {c} + {d}",
     "{name} has {a} {thing}, wins {b}, loses {c} and finds {d}. How many in the end?"),
    ("SMSS", "({a} * {b} - {c}) / {d}",
     "{name} buys {a} bags of {b} {thing}, uses {c} and shares the rest among {d}. How many each?"),
)  # fmt: skip
"""Sizes of the numbers a, b, c and d, the expression of the answer, and the text."""


def build_problems(split: Split, *, num_problems: int, seed: int) -> list[Problem]:
    """Generate `num_problems` different problems of a split, deterministically from `seed`."""
    rng = random.Random(f"{split}-{seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < num_problems:
        problem = _draw_problem(rng)
        if find_split(problem.question) == split:
            problems[problem.question] = problem
    return list(problems.values())


def find_split(question: str) -> Split:
    """The split of a question, computed from a hash of its text."""
    digest = hashlib.sha256(question.encode("utf-8")).digest()
    return "test" if digest[0] % HELD_OUT_RATIO == 0 else "train"


def save_problems(out_dir: Path, *, num_train: int, num_test: int, seed: int) -> None:
    counts: dict[Split, int] = {"train": num_train, "test": num_test}
    for split, count in counts.items():
        problems = build_problems(split, num_problems=count, seed=seed)
        write_rows(out_dir / f"{split}.jsonl", map(asdict, problems))


def compute_answer(expression: str) -> int | None:
    """The value of a template's expression; None if it is negative or not whole, as it is if a result before it is."""
    value = eval(expression)  # of numbers and operators alone
    return int(value) if value >= 0 and value == int(value) else None


def _draw_problem(rng: random.Random) -> Problem:
    sizes, template, text = rng.choice(TEMPLATES)
    words = {"name": rng.choice(NAMES), "thing": rng.choice(THINGS)}
    answer = None
    while answer is None:
        numbers = {key: rng.randint(*RANGES[size]) for key, size in zip("abcd", sizes, strict=False)}
        expression = template.format(**numbers)
        answer = compute_answer(expression)
    return Problem(
        question=text.format(**words, **numbers),
        answer=str(answer),
        expression=expression,
        num_operations=len(numbers) - 1,
    )
