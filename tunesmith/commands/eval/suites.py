"""Evaluation suites: a judge and measures of behavior under one name, and the data files that they read.

`tir` evaluates agents with tools on files of questions and answers, such as ET-Agent's test.jsonl: `question` and
`answer` (one or a list), or the names that other sets use. `tir_paper` is the same with ET-Agent's own scores beside.
What a task is scored as, mathematics or a question, is its field `ability`, else that of its set in the run file, else
that of the published set whose name the set or its file has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.config import BehaviorSection, DatasetSection, RunConfig
from tunesmith.errors import ConfigError, DataError
from tunesmith.judges.tir import ABILITIES, find_known_ability
from tunesmith.storage import load_json, load_json_lines
from tunesmith.tasks.load import add_fields, load_tasks
from tunesmith.types import Task

JUDGES: Mapping[str, str] = {
    "tir": "tunesmith.judges.tir:tir_judge",
    "tir_paper": "tunesmith.judges.tir:tir_paper_judge",
}
WORKFLOW = "tunesmith.environments:tool_agent"
BEHAVIOR = BehaviorSection(tool_keys=("tool_calls",), error_keys=("failed_calls",))
FIELDS: Mapping[str, tuple[str, ...]] = {
    "question": ("question", "problem", "Question", "input", "query"),
    "answer": ("answer", "final_answer", "Answer", "answers", "golden_answers"),
}
"""Field of a task -> names that it has in files, in order of preference."""


def apply_suite(config: RunConfig, suite: str | None) -> RunConfig:
    """The config with the judge and the measures of the suite, and with `tool_agent` if it names no workflow."""
    if suite is None:
        return config
    if suite not in JUDGES:
        raise ConfigError(f"suite={suite!r}; allowed: {', '.join(JUDGES)}")
    behavior = config.evaluation.behavior or BEHAVIOR
    changes = {
        "workflow": config.workflow or WORKFLOW,
        "judge": JUDGES[suite],
        "evaluation": config.evaluation.model_copy(update={"behavior": behavior}),
    }
    return config.model_copy(update=changes)


def load_suite_tasks(dataset: DatasetSection, *, name: str) -> list[Task]:
    """The tasks of a set, each with `question` and `answer`.

    JSON files are parsed directly: the answers of one file may be texts, numbers and lists.
    """
    path = Path(dataset.path).expanduser()
    if path.is_file() and path.suffix in (".jsonl", ".json"):
        rows = load_json_lines(path) if path.suffix == ".jsonl" else load_json(path)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
            raise DataError(f"{str(path)!r} must have objects of a question and an answer, and at least one")
    else:
        rows = [dict(task.row) for task in load_tasks(dataset, name=name)]
    names = (name, path.stem, path.parent.name) if path.suffix else (name, path.name, path.parent.name)
    fields = {"ability": find_known_ability(*names), **dataset.fields}
    tasks = [
        read_row(add_fields(dict(row), fields), where=f"row {index} of {dataset.path!r}")
        for index, row in enumerate(rows)
    ]
    return [Task(task_id=f"{name}/{index}", index=index, row=row) for index, row in enumerate(tasks)]


def read_row(row: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The row with `question` and `answer`; empty lists and empty texts are no answers."""
    found = dict(row)
    for field, names in FIELDS.items():
        name = next((each for each in names if row.get(each) not in (None, "", [])), None)
        if name is None:
            raise DataError(f"{where} has no {field}: none of {', '.join(names)} has a value")
        found[field] = row[name]
    if row.get("ability") not in (None, *ABILITIES):
        raise DataError(f"{where} has ability={row['ability']!r}; allowed: {', '.join(ABILITIES)}, or no such field")
    return found
