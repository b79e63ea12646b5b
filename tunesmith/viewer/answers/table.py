"""The table of answers by path, for the server and for reports."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.errors import TunesmithError
from tunesmith.viewer.answers.evaluations import list_answers, list_evaluations
from tunesmith.viewer.answers.overview import describe_runs, get_metric, get_versions, list_failures
from tunesmith.viewer.answers.search import search_rollouts
from tunesmith.viewer.answers.steps import (
    describe_group,
    describe_rollout,
    describe_selection,
    describe_step,
    describe_trie,
)
from tunesmith.viewer.answers.tasks import describe_task, diff_rollouts, list_repeated_tasks
from tunesmith.viewer.reading.run import Run


class UnknownAnswerError(TunesmithError):
    """There is no such path, run, step, group or rollout."""


class Answers:
    """Answers questions about runs, one at a time: callers are threads that share the runs' caches."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._lock = threading.Lock()

    def get_json(self, path: str, params: Mapping[str, str]) -> bytes:
        """The answer as JSON text, in which numbers that are not finite are null."""
        with self._lock:
            answer = self.get(path, params)
        return json.dumps(clean(answer), allow_nan=False, separators=(",", ":")).encode()

    def preload(self) -> None:
        """Read what every page asks for; errors are left to the requests."""
        with contextlib.suppress(TunesmithError, ValueError, KeyError, OSError):
            self.get_json("runs", {})

    def get(self, path: str, params: Mapping[str, str]) -> Any:
        """The answer for a path such as `step/0/40`; ValueError or UnknownAnswerError for a wrong one."""
        kind, *numbers = path.strip("/").split("/")
        try:
            keys = [int(number) for number in numbers]
        except ValueError:
            keys = [-1]
        if all(key >= 0 for key in keys):
            try:
                match kind, keys:
                    case (("runs" | "versions" | "metric" | "evaluations" | "answers" | "diff"), []):
                        return self._answer_all(kind, params)
                    case _, [run, *rest]:
                        return self._answer_run(kind, self.runs[run], rest, params)
            except (IndexError, KeyError) as error:
                raise UnknownAnswerError(f"there is nothing at {path!r} with these settings") from error
        raise UnknownAnswerError(f"there is nothing at {path!r}")

    def _answer_all(self, kind: str, params: Mapping[str, str]) -> Any:
        match kind:
            case "runs":
                return describe_runs(self.runs)
            case "versions":
                return get_versions(self.runs)
            case "metric":
                return get_metric(self.runs, params["name"])
            case "evaluations":
                return list_evaluations(self.runs)
            case "answers":
                return list_answers(self.runs, params)
            case _:
                return diff_rollouts(self.runs, params["before"], params["after"])

    def _answer_run(self, kind: str, run: Run, keys: Sequence[int], params: Mapping[str, str]) -> Any:
        match kind, keys:
            case "step", [step]:
                return describe_step(run, step)
            case "group", [step, group]:
                return describe_group(run, step, group)
            case "trie", [step, group]:
                return describe_trie(run, step, group)
            case "rollout", [step, group, number]:
                return describe_rollout(run, step, group, number)
            case "selection", [step]:
                return describe_selection(run, step)
            case "failures", []:
                return list_failures(run)
            case "tasks", []:
                return list_repeated_tasks(run)
            case "task", []:
                return describe_task(run, params["id"])
            case "search", []:
                return search_rollouts(run, params)
            case "config", []:
                return {"config": run.settings}
        raise KeyError(kind)


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
