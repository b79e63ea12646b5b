"""reasoning-gym: questions of a generator, scored by its own scorer.

The task with seed k is row 0 of the generator's data set with seed k, which is row k of seed 0. The reply is scored by
what it has between the last answer tags; a reply without them is scored as no answer, and an answer on which the scorer
raises as 0.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tunesmith.environments.episode import TaskEnvironment
from tunesmith.environments.sets import Stateless, arguments_checked
from tunesmith.environments.sets.random_state import ONE_THREAD, OwnRandomState
from tunesmith.errors import ConfigError

MIXTURE = ""
"""Member of the name `reasoning_gym` alone: each seed draws from one of the generators in turn."""
PAYS_FOR_NONSENSE = ("game_of_life_halting", "palindrome_generation", "propositional_logic", "sentence_reordering")
"""Generators whose scorers accept wrong or meaningless answers; available by name only."""
UNSUITABLE = ("composite",)
"""No generators of their own."""
NUM_ROWS = 2**31 - 1
DEPENDS_ON_SIZE = ("acre", "gsm_symbolic", "list_functions", "word_ladder")
"""Generators that prepare as many rows as the data set has; each of their seeds is a data set of one row."""
SYSTEM_PROMPT = (
    "Think about the question step by step. Then give the final answer, and nothing else, between <answer> and "
    "</answer>."
)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
CACHE_SIZE = 4096
"""Rows that are kept: all rollouts of a group ask for the same one."""


def list_names() -> list[str]:
    return [MIXTURE, *sorted(set(DATASETS) - set(UNSUITABLE))]


def load(member: str, args: dict[str, Any]) -> TaskEnvironment:
    if args and not member:
        raise ConfigError("environment.args has no effect with the mixture reasoning_gym: name a generator")
    questions = load_questions(member, json.dumps(args, sort_keys=True))
    return TaskEnvironment(
        name=f"reasoning_gym:{member}" if member else "reasoning_gym",
        create=partial(Question, questions),
        describe=questions.describe,
        system_prompt=SYSTEM_PROMPT,
        executor=ONE_THREAD,
    )


@lru_cache(8)
def load_questions(member: str, args: str) -> Questions:
    """The questions of a member, the same object for all splits of a run: some generators take 0.1 s for a row."""
    names = [member] if member else [each for each in list_names() if each and each not in PAYS_FOR_NONSENSE]
    return Questions({name: build_dataset(name, json.loads(args)) for name in names})


def build_dataset(name: str, args: Mapping[str, Any]) -> Any:
    """The data set with seed 0, or a function from a seed to a data set of one row."""
    fields = {each.name for each in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    if unknown := sorted(set(args) - fields):
        raise ConfigError(
            f"environment.args.{unknown[0]} is no argument of reasoning_gym:{name}; allowed are "
            f"{', '.join(sorted(fields))}"
        )
    build = partial(reasoning_gym.create_dataset, name, **args)
    with arguments_checked(f"reasoning_gym:{name}"), OwnRandomState(0).installed():
        shared = build(size=1 if name in DEPENDS_ON_SIZE else NUM_ROWS, seed=0)
    return partial(build, size=1) if name in DEPENDS_ON_SIZE else shared


class Questions:
    """The rows of generators by seed."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self._datasets = list(datasets.values())
        self.find = lru_cache(CACHE_SIZE)(self._find)

    def _find(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """The data set of a seed, and its row."""
        own_seed, index = divmod(seed, len(self._datasets))
        dataset = self._datasets[index]
        with OwnRandomState(seed).installed():
            if isinstance(dataset, partial):
                dataset, own_seed = dataset(seed=own_seed), 0
            return dataset, dataset[own_seed]

    def describe(self, seed: int) -> dict[str, Any]:
        _, row = self.find(seed)
        answer = row["answer"]
        return {"question": row["question"]} | ({} if answer is None else {"answer": str(answer)})


class Question(Stateless):
    """An episode of one question and one reply."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions

    def reset(self, task: Mapping[str, Any]) -> str:
        self._seed = int(task["seed"])
        self._dataset, self._row = self._questions.find(self._seed)
        return str(self._row["question"])

    def step(self, action: str) -> tuple[str, float, bool]:
        answers = ANSWER.findall(action)
        answer = answers[-1].strip() if answers else None
        try:
            with OwnRandomState(self._seed).installed():
                score = float(self._dataset.score_answer(answer, self._row))
        except Exception:  # noqa: BLE001 - scorers raise on answers that they cannot read
            score = 0.0
        return "", score, True
