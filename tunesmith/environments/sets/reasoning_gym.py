"""reasoning-gym: questions of a generator, scored by its own scorer.

The task with seed k is row 0 of the generator's data set with seed k, which is row k of seed 0. The reply is scored by
what it has between the last answer tags; a reply without them is scored as no answer, and an answer on which the scorer
raises as 0.

Some scorers evaluate the answer as Python, or as a formula of SymPy, whose parser does that too. A model could then run
code in this process, replace the scorer, or stop the process with a power tower. Their answers are parsed here first:
what is no list of literals, or no formula of moderate size, reaches the scorer as an answer that it cannot read.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
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
PAYS_FOR_NONSENSE = (
    "game_of_life_halting", "palindrome_generation", "propositional_logic", "puzzle24", "sentence_reordering",
)  # fmt: skip
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
UNREADABLE = "("
"""An answer that is neither Python nor a formula."""
EVALUATES_PYTHON = re.compile(r"\b(eval|exec)\(")
EVALUATES_FORMULAS = re.compile(r"\b(parse_expr|sympify)\(")
FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
"""Not `Integral`: the integral of the question, written so, would be the answer to it."""
ARITHMETIC = re.compile(r"[0-9\s+\-*/()]*")
"""Arithmetic on whole numbers. Scorers count the numbers of an answer by their digits, and miss 1e2, 0x64 and a/a."""
NOT_A_NUMBER = re.compile(r"(?<![a-z])nan[ij]?(?![a-z])", re.IGNORECASE)
"""Its distance from the right number is not more than any other: it would be paid in full."""
LITERAL_NODES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.USub, ast.UAdd, ast.Load)
"""No names: those of the scorer's variables would be read, such as that of the right answer."""
MAX_ANSWER = 4000
MAX_EXPONENT = 100
MAX_SIZE = 2000
"""Digits, or the degree, of a formula's value."""
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
        if answer not in (None, str(self._row["answer"])) and not self._is_harmless(answer):
            answer = UNREADABLE
        try:
            with OwnRandomState(self._seed).installed():
                score = float(self._dataset.score_answer(answer, self._row))
        except Exception:  # noqa: BLE001 - scorers raise on answers that they cannot read
            score = 0.0
        return "", score, True

    def _is_harmless(self, answer: str) -> bool:
        """Whether the scorer may read an answer that is not the right one."""
        right, checks = str(self._row["answer"]), find_checks(type(self._dataset).score_answer)
        if is_formula in checks and ARITHMETIC.fullmatch(right) and not ARITHMETIC.fullmatch(answer):
            return False
        return NOT_A_NUMBER.search(answer) is None and all(check(answer) for check in checks)


@lru_cache(None)
def find_checks(scorer: Callable[..., Any]) -> list[Callable[[str], bool]]:
    """What an answer must pass before a scorer evaluates it."""
    source = inspect.getsource(scorer)
    checks = {EVALUATES_PYTHON: is_literal, EVALUATES_FORMULAS: is_formula}
    return [check for pattern, check in checks.items() if pattern.search(source)]


def is_literal(answer: str) -> bool:
    """Whether evaluating the answer as Python yields numbers, strings and lists of them, or a syntax error."""
    try:
        tree = ast.parse(answer, mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    return all(isinstance(node, LITERAL_NODES) for node in ast.walk(tree))


def is_formula(answer: str) -> bool:
    """Whether the answer is a formula of moderate size, of numbers, letters and the functions of calculus."""
    try:
        return len(answer) <= MAX_ANSWER and _bound_size(ast.parse(answer, mode="eval").body) <= MAX_SIZE
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _bound_size(node: ast.expr) -> float:
    """Upper bound of digits and degree of a formula's value; ValueError if it is none."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return len(str(number))
        case ast.Name(id=name) if len(name) == 1 or name == "pi":
            return 1
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _bound_size(operand)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return 1 + _bound_size(argument)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            if isinstance(base, ast.Name) and base.id == "E":
                return 1 + _bound_size(exponent)
            return _bound_size(base) * _read_exponent(exponent)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _bound_size(left) + _bound_size(right)
    raise ValueError(f"{type(node).__name__} is not part of a formula")


def _read_exponent(node: ast.expr) -> float:
    """The size of a number or a fraction that is no more than `MAX_EXPONENT`."""
    match node:
        case ast.Constant(value=int() | float() as number) if 0 <= number <= MAX_EXPONENT:
            return max(1.0, number)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _read_exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return max(_read_exponent(left), _read_exponent(right))
    raise ValueError("not an exponent")
