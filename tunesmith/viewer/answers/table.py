"""The table of answers by path, for the server and for reports."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunesmith.errors import TunesmithError
from tunesmith.viewer.answers.evaluations import list_answers, list_evaluations
from tunesmith.viewer.answers.overview import (
    describe_diagnosis,
    describe_runs,
    get_metric,
    get_versions,
    list_failures,
    save_notes,
)
from tunesmith.viewer.answers.search import search_rollouts
from tunesmith.viewer.answers.steps import (
    build_trie,
    describe_group,
    describe_rollout,
    describe_selection,
    describe_step,
)
from tunesmith.viewer.answers.tasks import describe_task, diff_rollouts, list_repeated_tasks
from tunesmith.viewer.reading.run import Run, find_new_runs

OF_ALL: Mapping[str, Callable[[Sequence[Run], Mapping[str, str]], Any]] = {
    "runs": lambda runs, _: describe_runs(runs),
    "versions": lambda runs, _: get_versions(runs),
    "metric": lambda runs, params: get_metric(runs, params["name"]),
    "evaluations": lambda runs, _: list_evaluations(runs),
    "answers": list_answers,
    "diff": lambda runs, params: diff_rollouts(runs, params["before"], params["after"]),
}
"""Answers about all runs, from the parameters of the query."""
OF_RUN: Mapping[str, Callable[[Run, Mapping[str, str]], Any]] = {
    "failures": lambda run, _: list_failures(run),
    "diagnosis": lambda run, _: describe_diagnosis(run),
    "tasks": lambda run, _: list_repeated_tasks(run),
    "task": lambda run, params: describe_task(run, params["id"]),
    "search": search_rollouts,
    "config": lambda run, _: {"config": run.settings},
}
"""Answers about the run whose number follows in the path."""
OF_STEPS: Mapping[tuple[str, int], Callable[..., Any]] = {
    ("step", 1): describe_step,
    ("selection", 1): describe_selection,
    ("group", 2): describe_group,
    ("trie", 2): lambda run, step, group: build_trie(run.load_group(step, group), run.text),
    ("rollout", 3): describe_rollout,
}
"""Answers about a step, a group or a rollout of a run, by the number of further keys in the path."""


class UnknownAnswerError(TunesmithError):
    """There is no such path, run, step, group or rollout."""


class Answers:
    """Answers questions about runs, one at a time: callers are threads that share the runs' caches.

    Runs that appear at `paths` later are appended to `runs`.
    """

    def __init__(self, runs: list[Run], *, paths: Sequence[str] = ()) -> None:
        self.runs, self.paths = runs, paths
        self._lock = threading.Lock()

    def get_json(self, path: str, params: Mapping[str, str]) -> bytes:
        """The answer as JSON text, in which numbers that are not finite are null."""
        with self._lock:
            answer = self.get(path, params)
        return json.dumps(clean(answer), allow_nan=False, separators=(",", ":")).encode()

    def save_notes(self, number: int, given: Any) -> bytes:
        """Save what the user wrote about a run; the notes as JSON text."""
        with self._lock:
            if not 0 <= number < len(self.runs) or not isinstance(given, dict):
                raise UnknownAnswerError(f"there is no run {number} to write notes of")
            return json.dumps(save_notes(self.runs[number], given)).encode()

    def preload(self) -> None:
        """Read what every page asks for; errors are left to the requests."""
        with contextlib.suppress(TunesmithError, ValueError, KeyError, OSError):
            self.get_json("runs", {})

    def get(self, path: str, params: Mapping[str, str]) -> Any:
        """The answer for a path such as `step/0/40`; ValueError or UnknownAnswerError for a wrong one."""
        kind, *numbers = path.strip("/").split("/")
        if not all(number.isdecimal() for number in numbers):
            raise UnknownAnswerError(f"there is nothing at {path!r}")
        try:
            if not numbers:
                if kind == "versions" and self.paths:
                    find_new_runs(self.runs, self.paths)
                return OF_ALL[kind](self.runs, params)
            run, keys = self.runs[int(numbers[0])], [int(number) for number in numbers[1:]]
            return OF_STEPS[kind, len(keys)](run, *keys) if keys else OF_RUN[kind](run, params)
        except (IndexError, KeyError) as error:
            raise UnknownAnswerError(f"there is nothing at {path!r} with these settings") from error


def clean(value: Any) -> Any:
    """The value with numbers that JSON does not have replaced by null, and keys as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): clean(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [clean(each) for each in value]
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
