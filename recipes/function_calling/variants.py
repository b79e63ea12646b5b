"""Training tasks that look new each time: their functions in another order, among functions of other training tasks.

`vary` is an operator of the training set, and `play_varied` the workflow for its tasks:

    workflow: recipes.function_calling.variants:play_varied
    train_dataset:
      path: environment
      operators: [{name: "recipes.function_calling.variants:vary", args: {num_variants: 6, max_added: 3}}]

A variant is a task of its own: all rollouts of its group have the same prompt, which depends on the task, the number of
the variant and the seed alone. Calls are judged as before, by the functions and the accepted calls of the task.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from tunesmith.environments import TaskEnvironment, play
from tunesmith.environments.sets.bfcl import (
    Question,
    Row,
    find_data,
    find_names,
    load_rows,
    offer_name,
    split_irrelevance,
)
from tunesmith.types import Task, WorkflowOutput

WORD = re.compile(r"[A-Z]?[a-z]{2,}")
COMMON = {"get", "set", "find", "calculate", "search", "for", "the", "of", "by", "in", "to", "and", "from", "info"}
"""Words that two functions may share though neither answers the other's questions."""


def vary(
    tasks: Sequence[Task],
    *,
    num_variants: PositiveInt,
    max_added: NonNegativeInt,
    path: str | None = None,
    seed: NonNegativeInt = 0,
) -> tuple[list[Task], dict[str, float]]:
    """`num_variants` of each task of `bfcl`: up to `max_added` functions more, all of them and their parameters in a
    random order. Added functions are called in another task, and share no word with the question or with a function."""
    folder = find_data(path)
    rows = load_rows(folder, "") | split_irrelevance(folder, sys.maxsize)
    lines = {task.task_id: rows[task.row["id"]].line for task in tasks}
    called = {name for line in lines.values() if "accepted" in line for name in find_names(line)}
    pool = {each["name"]: each for line in lines.values() for each in line["function"] if each["name"] in called}
    variants, num_added = [], 0
    for task in tasks:
        for number in range(num_variants):
            line = lines[task.task_id]
            functions = change_functions(
                line, list(pool.values()), max_added, random.Random(f"{seed}/{line['id']}/{number}")
            )
            num_added += len(functions) - len(line["function"])
            row = {**task.row, "line": {**line, "function": functions}}
            variants.append(replace(task, task_id=f"{task.task_id}/variant-{number}", row=row))
    return variants, {"num_variants": float(len(variants)), "added_mean": num_added / max(len(variants), 1)}


def change_functions(
    line: Mapping[str, Any], pool: Sequence[Mapping[str, Any]], max_added: int, rng: random.Random
) -> list[dict[str, Any]]:
    functions = list(line["function"])
    words = find_words(" ".join(each["content"] for each in line["question"][0]))
    num_functions = len(functions) + rng.randint(0, max_added)
    for each in rng.sample(pool, min(len(pool), 10 * max_added)):
        taken = words.union(*(find_words(other["name"]) for other in functions))
        names = {offer_name(other["name"]) for other in functions}
        if (
            len(functions) < num_functions
            and not find_words(each["name"]) & taken
            and offer_name(each["name"]) not in names
        ):
            functions.append(each)
    return [shuffle_parameters(each, rng) for each in rng.sample(functions, len(functions))]


def find_words(text: str) -> set[str]:
    return {each.lower() for each in WORD.findall(text)} - COMMON


def shuffle_parameters(function: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    parameters = function["parameters"]
    properties = list(parameters["properties"].items())
    rng.shuffle(properties)
    return {**function, "parameters": {**parameters, "properties": dict(properties)}}


async def play_varied(task: Mapping[str, Any], model: Any, environment: TaskEnvironment) -> WorkflowOutput:
    """As `play`, with the functions of a variant."""
    return await play(task, model, offer_variant(task, environment))


def offer_variant(task: Mapping[str, Any], environment: TaskEnvironment) -> TaskEnvironment:
    """The environment for a task of `vary`; the same one for other tasks, such as those of evaluations."""
    if (line := task.get("line")) is None:
        return environment
    return replace(environment, create=partial(Question, {task["id"]: Row(line, places=())}))
