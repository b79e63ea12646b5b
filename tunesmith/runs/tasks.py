"""The tasks of a run: rows of a data set, or of the environment that the run names."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.config import DatasetSection, EnvironmentSection, RunConfig
from tunesmith.config.environment import PLAY
from tunesmith.environments.sets import FAMILIES
from tunesmith.errors import ConfigError, DataError
from tunesmith.runs.load_function import TOOL_AGENTS, has_environment_tasks, load_environment, load_task_environment
from tunesmith.tasks.load import load_tasks
from tunesmith.types import Task


def load_run_tasks(config: RunConfig, dataset: DatasetSection, *, name: str) -> list[Task]:
    """`load_tasks` for a data set of a run, which may stand for the tasks of the run's environment."""
    section = config.environment
    if not has_environment_tasks(config, dataset):
        tasks = load_tasks(dataset, name=name)
        if section.name is not None and config.workflow == PLAY:
            check_environment_rows(tasks, section.name, path=dataset.path)
        if config.workflow in TOOL_AGENTS:
            check_row_tools(tasks, section, path=dataset.path)
        return tasks
    environment = load_task_environment(config)
    splits = ["train", "test"] if environment.rows is None else list(environment.rows)
    if dataset.split not in splits:
        known = f"environment {section.name!r} are {', '.join(splits)}"
        raise ConfigError(f"split={dataset.split!r}: the splits of {known}")
    if not (number := section.num_train if dataset.split == "train" else section.num_test):
        raise ConfigError("environment.num_test=0 leaves no held-out task: raise it, or set eval_datasets={}")
    rows = environment.list_rows(dataset.split, number=number, seed=section.seed)
    return [Task(task_id=f"{name}/{index}", index=index, row=row) for index, row in enumerate(rows)]


def check_row_tools(tasks: Sequence[Task], section: EnvironmentSection, *, path: str) -> None:
    """Refuse rows that name tools which the environment of a tool agent has not."""
    if named := [each for each in tasks if each.row.get("tools") is not None]:
        environment = load_environment(section)
        for task in named:
            try:
                environment.for_task(task.row)
            except ValueError as error:
                raise DataError(f"row {task.index} of {path!r}: {error}") from error


def check_environment_rows(tasks: Sequence[Task], name: str, *, path: str) -> None:
    """Refuse rows of a file that are no tasks of an environment of a family; own ones read any rows."""
    if name.partition(":")[0] not in FAMILIES:
        return
    for task in tasks:
        if (found := task.row.get("environment")) != name or not isinstance(task.row.get("seed"), int):
            of = "no environment" if found is None else f"environment {found!r}"
            raise DataError(
                f"row {task.index} of {path!r} is a task of {of}, not of {name!r}: leave out the data set, or give one "
                "that a run with this environment wrote"
            )
