"""The Berkeley Function Calling Leaderboard, v4: single-turn questions, and conversations with simulated services.

The data are those of the installed package bfcl-eval, or of the folder `args.path`; the package is not imported for
single-turn questions. These are judged by `bfcl_calls`. In conversations, calls are dispatched by name to an allow
list of methods, never evaluated as text, and each rollout has services of its own. A turn of the user ends with a
reply that calls nothing. It is right if all services have the public attributes that the accepted calls produce, and
every result of these is among the results so far, as in the benchmark's own checker.

Tasks that name the same function in their accepted calls are in the same split, as are conversations that begin in the
same state of the services. `args.validation` takes a split for the choice of settings from the training tasks.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import decimal
import hashlib
import importlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tunesmith.chat.parsers import CALL_FORMATS
from tunesmith.chat.parsers.json_calls import JSON
from tunesmith.environments.episode import Observation, Reply, Step, TaskEnvironment
from tunesmith.environments.protocols import write_result
from tunesmith.environments.sets import Stateless, find_package_data
from tunesmith.environments.sets.bfcl_calls import find_mistake
from tunesmith.environments.sets.random_state import ONE_THREAD
from tunesmith.errors import ConfigError
from tunesmith.tools.tool import ToolInputError, write_schema

TRAINED = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple")
"""Single-turn categories that are split; `bfcl` alone is all of them."""
HELD_OUT = ("live_parallel", "live_parallel_multiple", "irrelevance", "live_irrelevance", "live_relevance")
"""Categories of which every task is held out; the last three only ask whether to call."""
MULTI_TURN = tuple(f"multi_turn_{each}" for each in ("base", "miss_func", "miss_param", "long_context"))
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
"""What the user says, in the benchmark's words, when a function is added."""
SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""Types of the descriptions that JSON schemas do not have."""
SERVICES = {
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot", "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}  # fmt: skip
CALL_TAGS = {tag for each in CALL_FORMATS.values() if each is not JSON for tag in (*each.openers, *each.inner_markup)}
NAME_KEY, ARGUMENTS_KEY = re.compile(r"\"name\"\s*:"), re.compile(r"\"(?:arguments|parameters)\"\s*:")
FIRST_ARGUMENT = r"(?:\.call)?\(\s*(?:\w+\s*=|[-\"'\d\[{])"
NUM_TEST_PLACES = 30
"""Of the 100 places of functions and states that are held out."""
MAX_DIGITS = 300
"""Of numbers that calls of MathAPI may ask for; more would take hours and gigabytes."""
LIMITS = {"exponent": MAX_DIGITS, "precision": MAX_DIGITS, "decimal_places": MAX_DIGITS, "base": 10.0**MAX_DIGITS}
"""The largest size of the parameters of MathAPI that determine how long a number is computed."""


def list_names() -> list[str]:
    return ["", *TRAINED, *HELD_OUT, *MULTI_TURN]


def load(
    member: str,
    *,
    path: str | None = None,
    pay_turns: bool | None = None,
    irrelevance: Annotated[int, Field(ge=0)] | None = None,
    validation: Annotated[int, Field(ge=0, lt=100 - NUM_TEST_PLACES)] | None = None,
) -> TaskEnvironment:
    for argument, value, has_effect in (
        ("pay_turns", pay_turns, member in MULTI_TURN), ("irrelevance", irrelevance, not member),
        ("validation", validation, member not in HELD_OUT),
    ):  # fmt: skip
        if value is not None and not has_effect:
            raise ConfigError(f"environment.args.{argument} has no effect with bfcl:{member}".rstrip(":"))
    if member in MULTI_TURN:
        for service in SERVICES:
            load_service(service)
    folder = find_data(path)
    rows = load_rows(folder, member)
    if irrelevance is not None:
        rows = rows | split_irrelevance(folder, irrelevance)
    splits: dict[str, list[Mapping[str, Any]]] = {
        split: [] for split in ("train", "test", *(("validation",) if validation else ()))
    }
    for seed, identity in enumerate(sorted(rows, key=digest)):
        line = rows[identity].line
        answer = {"answer": json.dumps(line["accepted"])} if "accepted" in line else {}
        if (split := rows[identity].find_split(validation or 0)) is not None:
            question = line["question"][0][-1]["content"]
            splits[split].append({"seed": seed, "id": identity, "question": question, **answer})
    create = partial(Conversation, rows, folder, bool(pay_turns)) if member in MULTI_TURN else partial(Question, rows)
    return TaskEnvironment(
        name=f"bfcl:{member}".removesuffix(":"),
        create=create,
        rows=splits,
        executor=ONE_THREAD,  # the services share the precision of mpmath and tables of their modules
    )


def find_data(path: str | None) -> Path:
    """The folder with the files of the benchmark."""
    folder = find_package_data("bfcl", path)
    if not (folder / "BFCL_v4_simple_python.json").is_file():
        raise ConfigError(f"environment.args.path={path!r} has no file BFCL_v4_simple_python.json")
    return folder


@dataclass(frozen=True)
class Row:
    """A task of the benchmark: a line of its files, with the `accepted` calls if there are any."""

    line: Mapping[str, Any]
    places: Collection[int]
    """Of its functions or its state, from 0 to 99."""

    @property
    def is_held_out(self) -> bool:
        return self.find_split(0) == "test"

    def find_split(self, validation: int) -> str | None:
        """The split; None if the places are of several. `validation`: how many places that split has."""
        limits = ((NUM_TEST_PLACES, "test"), (NUM_TEST_PLACES + validation, "validation"), (100, "train"))
        splits = {next(split for limit, split in limits if place < limit) for place in self.places}
        return splits.pop() if len(splits) == 1 else None

    @cached_property
    def names(self) -> dict[str, str]:
        """The functions' names by those under which they are offered."""
        return {offer_name(each["name"]): each["name"] for each in self.line["function"]}

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The functions as tools of a chat request."""
        return [describe(each) for each in self.line["function"]]


@lru_cache(8)
def load_rows(folder: Path, member: str) -> dict[str, Row]:
    """The tasks of a category, or of all that are trained, by their ids."""
    if member in MULTI_TURN:
        # a conversation is a variant of the one with its number in multi_turn_base
        pairs = zip(read_lines(folder, member), read_lines(folder, MULTI_TURN[0]), strict=True)
        states = [(line, json.dumps(base["initial_config"], sort_keys=True)) for line, base in pairs]
        return {line["id"]: Row(line, [find_place(state)]) for line, state in states}
    if member in HELD_OUT:
        return {line["id"]: Row(line, [0]) for line in read_lines(folder, member)}
    groups = group_functions(folder)
    lines = [line for category in ([member] if member else TRAINED) for line in read_lines(folder, category)]
    return {line["id"]: Row(line, [find_place(groups[find_names(line)[0]])]) for line in lines}


def split_irrelevance(folder: Path, num_train: int) -> dict[str, Row]:
    """Questions that no offered function answers, as far as all functions of each are of one split: at most `num_train`
    to train, and all that are held out."""
    groups, rows = group_functions(folder), dict[str, Row]()
    lines = [*read_lines(folder, "irrelevance"), *read_lines(folder, "live_irrelevance")]
    for line in sorted(lines, key=lambda each: digest(each["id"])):
        row = Row(line, [find_place(groups.get(each["name"], each["name"])) for each in line["function"]])
        if row.is_held_out or (row.find_split(0) == "train" and (num_train := num_train - 1) >= 0):
            rows[line["id"]] = row
    return rows


def digest(identity: str) -> bytes:
    return hashlib.sha256(identity.encode()).digest()


def read_lines(folder: Path, category: str) -> list[dict[str, Any]]:
    """The rows of a category, with `accepted` calls if there are any."""
    name = f"BFCL_v4_{category}.json"
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    answers = folder / "possible_answer" / name
    if answers.is_file():
        for row, line in zip(rows, answers.read_text().splitlines(), strict=True):
            answer = json.loads(line)
            if answer["id"] != row["id"]:
                raise ConfigError(f"{answers} has the answer of {answer['id']} where that of {row['id']} is expected")
            row["accepted"] = answer["ground_truth"]
    return rows


def find_place(identity: str) -> int:
    return int(hashlib.sha256(f"bfcl-1:{identity}".encode()).hexdigest(), 16) % 100


def find_names(row: Mapping[str, Any]) -> list[str]:
    return [name for call in row["accepted"] for name in call]


@lru_cache(2)
def group_functions(folder: Path) -> dict[str, str]:
    """The least name in the group of each function; functions of one task are in a group, over all categories."""
    parents: dict[str, str] = {}

    def find(name: str) -> str:
        while parents.setdefault(name, name) != name:
            name = parents[name]
        return name

    for category in TRAINED:
        for row in read_lines(folder, category):
            roots = sorted({find(each) for each in find_names(row)})
            parents.update(dict.fromkeys(roots, roots[0]))
    return {name: find(name) for name in parents}


def is_attempt(text: str, row: Row) -> bool:
    """Whether a text has a call that is none: of an invented function, unreadable, or in another format.

    Where no call is right it is not paid: a policy learns to write such text in place of an answer.
    """
    if any(tag in text for tag in CALL_TAGS):
        return True
    if (key := NAME_KEY.search(text)) and ARGUMENTS_KEY.search(text, key.end()):
        return True
    offered = "|".join(map(re.escape, {*row.names, *row.names.values()}))
    return bool(offered) and re.search(rf"(?<![\w.])(?:{offered}){FIRST_ARGUMENT}", text) is not None


def offer_name(name: str) -> str:
    """The name that a tool of a chat request may have."""
    return re.sub(r"[^\w-]", "_", name)


def describe(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of a chat request."""
    parameters = convert_schema(function["parameters"])
    return write_schema(offer_name(function["name"]), function["description"], parameters)


def convert_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema of a description."""
    converted = {**schema, "type": SCHEMA_TYPES.get(schema["type"], schema["type"])}
    if "properties" in schema:
        converted["properties"] = {name: convert_schema(each) for name, each in schema["properties"].items()}
    if "items" in schema:
        converted["items"] = convert_schema(schema["items"])
    return converted


class Question(Stateless):
    """A question and one reply, whose calls are compared with the accepted ones."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        self._rows = rows
        self.metrics: dict[str, float] = {}

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._row = self._rows[task["id"]]
        self.tools = self._row.schemas
        messages: Observation = self._row.line["question"][0]
        return messages

    async def step(self, action: Reply) -> Step:
        line = self._row.line
        calls = [(self._row.names.get(each.tool, each.tool), each.arguments) for each in action.calls]
        readable = [(name, arguments) for name, arguments in calls if arguments is not None]
        self.metrics = {"called": float(bool(readable))}
        if "accepted" not in line:
            if line["id"].startswith("live_relevance"):
                return "", float(bool(readable)), True
            is_answer = bool(action.strip()) and not readable  # a reply cut off in its reasoning says nothing
            return "", float(is_answer and not is_attempt(action, self._row)), True
        self.metrics["right_names"] = float(sorted(name for name, _ in calls) == sorted(find_names(line)))
        is_right = len(readable) == len(calls) and not find_mistake(
            line["function"], readable, line["accepted"], is_parallel="parallel" in line["id"]
        )
        return "", float(is_right), True


class Services:
    """The services of a conversation, in their first state, and the results of the calls so far."""

    def __init__(self, line: Mapping[str, Any]) -> None:
        self.instances = {name: load_service(name)() for name in line["involved_classes"]}
        for name, each in self.instances.items():
            if name != "MathAPI":
                state = copy.deepcopy(line["initial_config"].get(name, {}))
                each._load_scenario(state, long_context="long_context" in line["id"])
        self._methods = {
            name: method
            for each in self.instances.values()
            for name, method in inspect.getmembers(each, inspect.ismethod)
            if not name.startswith("_")
        }
        self.results: list[str] = []

    def answer(self, name: str, arguments: Mapping[str, Any] | None) -> str:
        """What the model reads after a call."""
        if name not in self._methods:
            return f"Error: there is no function {name[:60]!r}."
        if arguments is None:
            return f"Error: the arguments of {name} are no JSON object."
        try:
            return self.call(name, **arguments)
        except ToolInputError as error:
            return f"Error: {error}."

    def call(self, name: str, /, *values: Any, **arguments: Any) -> str:
        """The result of a call; an error of a service is one too."""
        method = self._methods[name]
        with bound_numbers(method, values, arguments):
            try:
                result = method(*values, **arguments)
                is_json = isinstance(result, dict)
                text = result if isinstance(result, str) else json.dumps(result) if is_json else str(result)
            except Exception as error:  # noqa: BLE001 - services raise on arguments that they cannot use
                text = f"Error during execution: {error}"
        self.results.append(text)
        return text

    @property
    def state(self) -> dict[str, Any]:
        """The public attributes."""
        return {
            f"{name}.{key}": value
            for name, each in self.instances.items()
            for key, value in vars(each).items()
            if not key.startswith("_")
        }


@contextlib.contextmanager
def bound_numbers(method: Any, values: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
    """MathAPI sets the precision of the process, and would compute numbers of any length."""
    if type(method.__self__).__name__ != "MathAPI":
        yield
        return
    named = dict(zip(inspect.signature(method).parameters, values, strict=False)) | dict(arguments)
    for name, value in named.items():
        if name in LIMITS and is_above(value, LIMITS[name]):
            raise ToolInputError(f"{method.__name__} takes no {name} above {LIMITS[name]:g} here")
    mpmath = importlib.import_module("mpmath")
    with mpmath.workdps(mpmath.mp.dps), decimal.localcontext():
        yield


def is_above(value: Any, limit: float) -> bool:
    """Whether the size of a number, also one written as text, is above a limit."""
    try:
        return abs(float(value) if isinstance(value, str) else value) > limit
    except (TypeError, ValueError):  # the call itself answers that it is no number
        return False


@lru_cache
def load_service(name: str) -> Any:
    folder = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
    return getattr(importlib.import_module(f"{folder}.{SERVICES[name]}"), name)


@lru_cache
def read_descriptions(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "multi_turn_func_doc" / f"{SERVICES[name]}.json").read_text().splitlines()
    return [describe(each) for each in map(json.loads, lines)]


class Conversation(Stateless):
    """A conversation about the state of services."""

    def __init__(self, rows: Mapping[str, Row], folder: Path, pays_turns: bool) -> None:
        self._rows, self._folder, self._pays_turns = rows, folder, pays_turns
        self.tools: list[dict[str, Any]] = []

    def reset(self, task: Mapping[str, Any]) -> Observation:
        self._line = self._rows[task["id"]].line
        self._services, self._right = Services(self._line), Services(self._line)
        self._turn = 0
        return self._begin_turn()

    def step(self, action: Reply) -> Step:
        if action.calls:
            answer = self._services.answer
            return [write_result(each.call_id, answer(each.tool, each.arguments)) for each in action.calls], 0.0, False
        num_turns = len(self._line["question"])
        is_right = self._is_turn_right()
        if is_right:
            self._turn += 1
        is_done = not is_right or self._turn == num_turns
        reward = is_right / num_turns if self._pays_turns else float(is_right and is_done)
        return "" if is_done else self._begin_turn(), reward, is_done

    @property
    def metrics(self) -> dict[str, float]:
        return {"right_turns": self._turn / len(self._line["question"])}

    def _begin_turn(self) -> Observation:
        missed = self._line.get("missed_function", {}).items()
        later = [name for turn, names in missed if int(turn) > self._turn for name in names]
        hidden = {each.rpartition(".")[2] for each in [*self._line.get("excluded_function", ()), *later]}
        self.tools = [
            each
            for service in self._services.instances
            for each in read_descriptions(self._folder, service)
            if each["function"]["name"] not in hidden
        ]
        self._num_before = len(self._services.results)
        messages: Observation = self._line["question"][self._turn]
        return messages or MORE_FUNCTIONS

    def _is_turn_right(self) -> bool:
        """Whether the calls of this turn did what the accepted ones do."""
        self._right.results.clear()
        for text in self._line["accepted"][self._turn]:
            call = ast.parse(text, mode="eval").body
            assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name), text
            named = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}
            self._right.call(call.func.id, *map(ast.literal_eval, call.args), **named)
        if not self._right.results:
            return True
        results = self._services.results
        is_found = Counter(self._right.results) <= Counter(results)
        return is_found and len(results) > self._num_before and self._services.state == self._right.state
