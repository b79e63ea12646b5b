"""Pass rates of a model on a training set, written as a field of its rows for use by task selectors.

The agent runs `num_runs` times on every task; nothing is trained, and the data set's operators are not applied. Results
are appended batch by batch to `<out>.part`, so a killed measurement of the same tasks with the same settings resumes
after its last complete batch. With `tool_keys`, rows also get the outcome and the tool calls of each scored rollout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.commands.stage import ChooseModel, StageResult, describe_device
from tunesmith.config import PassRateConfig, RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import ConfigError, DataError, errors_of
from tunesmith.experience.operators import compute_pass_rates
from tunesmith.model.load import check_section
from tunesmith.model.source.fingerprint import describe_weights
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import build_evaluator
from tunesmith.rollout.group import build_requests
from tunesmith.runs.load_function import load_functions
from tunesmith.runs.policy import BuildModel, load_actors
from tunesmith.runs.result import Result
from tunesmith.runs.tasks import load_run_tasks
from tunesmith.runs.workspace import compute_digest, describe_rows, digest_rows, open_part
from tunesmith.storage import load_json_lines, save_text
from tunesmith.types import Group, JudgeType, Task, WorkflowType, compute_outcome, read_metric

SETTINGS = ("model", "auxiliary_models", "workflow", "judge", "environment", "train_dataset", "seed")
"""Sections that pass rates depend on; others, such as `engine`, may change when a measurement is resumed."""
TASKS_FILE = "tasks.jsonl"
"""Output of a stage."""
CORRECTNESS, TOOL_CALLS = "correctness", "tool_calls"
"""Ends of the names of the fields with one number for each scored rollout."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PassRates(Result):
    """Result of a measurement."""

    path: Path
    num_rows: int
    num_unscored: int
    """Tasks without a scored rollout; their rows are omitted."""

    def list_facts(self) -> dict[str, str]:
        rows = f"{self.num_rows}, {self.num_unscored} dropped without a scored rollout"
        return {"path": str(self.path), "rows": rows}


def measure_pass_rates(
    config: RunConfig,
    *,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    field: str,
    num_runs: int,
    out: Path,
    tool_keys: Sequence[str] = (),
    max_tasks: int | None = None,
) -> PassRates:
    """Write the first `max_tasks` rows of the training set, or all, with the model's pass rate under `field`."""
    if num_runs < 1:
        raise ConfigError(f"num_runs={num_runs} must be at least 1: it is the number of rollouts of each task")
    if not field:
        raise ConfigError("field is empty: name the field of the rows that receives the pass rate")
    rows = load_unmeasured_tasks(
        config, fields=[field, *(f"{field}_{end}" for end in (CORRECTNESS, TOOL_CALLS) if tool_keys)]
    )
    tasks = rows[:max_tasks]
    check_section(config.model)
    settings = config.model_dump(mode="json", include=set(SETTINGS))
    more = {"outcome_key": config.experience.outcome_key, "num_runs": num_runs, "tool_keys": list(tool_keys)}
    weights = describe_weights(config.model.path)
    # earlier versions saved nothing but this digest
    digest = compute_digest([settings, weights, describe_rows(rows), *more.values()])
    inputs = {"digest": digest, **describe_inputs(config, rows, settings=settings | more, weights=weights)}
    with open_part(out, inputs) as journal:
        num_done = sum(map(len, journal.rows))
        if num_done > len(tasks):
            raise ConfigError(
                f"{journal.path} has {num_done} measured tasks, more than max_tasks={max_tasks}: raise max_tasks, or "
                "remove the file"
            )
        policy, actors = load_actors(config, workflow=workflow, judge=judge, build_model=build_model)

        def record(start: int, groups: Sequence[Group]) -> None:
            records = describe_groups(groups, outcome_key=config.experience.outcome_key, tool_keys=tool_keys)
            # one line for a batch: for each task its index, its pass rate, and the numbers of its rollouts
            journal.append([[start + offset, *each] for offset, each in enumerate(records)])

        with closing(policy):
            run_lockstep(run_batches(config, actors, tasks, num_runs, num_done, record), config.rollout)
        return write_result(journal.path, tasks, field=field, out=out)


async def run_batches(
    config: RunConfig,
    actors: Actors,
    tasks: Sequence[Task],
    num_runs: int,
    num_done: int,
    record: Callable[[int, Sequence[Group]], None],
) -> None:
    """Run the agent `num_runs` times on each task after the first `num_done`; `record` gets the number of tasks before
    a batch, and the batch's groups."""
    async with build_evaluator(actors) as dispatcher:
        for start in range(num_done, len(tasks), config.algorithm.batch_size):
            part = tasks[start : start + config.algorithm.batch_size]
            requests = build_requests(part, size=num_runs, seed=config.seed, step=start)
            groups = await dispatcher.evaluate(requests, max_failure_rate=config.rollout.max_failure_rate)
            record(start, groups)


def describe_inputs(
    config: RunConfig, rows: Sequence[Task], *, settings: Mapping[str, Any], weights: Any
) -> dict[str, Any]:
    """What the rollouts of batches depend on."""
    return {
        "settings": settings,
        "weights": weights,
        "sources": {"train_dataset": digest_rows(describe_rows(rows))},
        "algorithm": {"batch_size": config.algorithm.batch_size},  # seeds depend on where a batch starts
    }


def load_unmeasured_tasks(config: RunConfig, *, fields: Sequence[str]) -> list[Task]:
    """Tasks of `train_dataset`; raise DataError if a row already has one of the fields."""
    if config.train_dataset is None:
        raise ConfigError("the agent runs on the tasks of train_dataset, and there is none: set train_dataset.path")
    with errors_of("train_dataset"):
        tasks = load_run_tasks(config, config.train_dataset, name="train")
    for field in fields:
        if any(field in task.row for task in tasks):
            raise DataError(
                f"the rows of {config.train_dataset.path!r} already have a field {field!r}; choose another name"
            )
    return tasks


def describe_groups(groups: Sequence[Group], *, outcome_key: str | None, tool_keys: Sequence[str]) -> list[list[Any]]:
    """Pass rate of each task, None where no rollout was scored; with `tool_keys` also the outcome and the tool calls of
    each scored rollout."""
    records: list[list[Any]] = [[rate] for rate in compute_pass_rates(groups, outcome_key)]
    if tool_keys:
        for record, group in zip(records, groups, strict=True):
            record.append([compute_outcome(run, outcome_key) for run in group.scored])
            record.append([sum(read_metric(run, key, knob="tool_keys") for key in tool_keys) for run in group.scored])
    return records


def write_result(partial_file: Path, tasks: Sequence[Task], *, field: str, out: Path) -> PassRates:
    names = (field, f"{field}_{CORRECTNESS}", f"{field}_{TOOL_CALLS}")
    records = [record[1:] for batch in load_json_lines(partial_file) for record in batch]
    rows = [
        json.dumps({**task.row, **dict(zip(names, values, strict=False))}, ensure_ascii=False, default=str)
        for task, values in zip(tasks, records, strict=True)
        if values[0] is not None
    ]
    save_text(out, "".join(f"{row}\n" for row in rows))
    return PassRates(path=out, num_rows=len(rows), num_unscored=len(tasks) - len(rows))


def run_stage(config: PassRateConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Measure the tasks into `tasks.jsonl`, unless an earlier attempt was killed after it was complete."""
    path = out_dir / TASKS_FILE
    if not path.exists():
        workflow, judge = load_functions(config)
        measure_pass_rates(
            config,
            workflow=workflow,
            judge=judge,
            build_model=choose_model(config),
            field=config.field,
            num_runs=config.num_runs,
            out=path,
            tool_keys=config.tool_keys,
            max_tasks=config.max_tasks,
        )
    rates = [row[config.field] for row in load_json_lines(path)]
    return StageResult(
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures={
            "tasks with a scored rollout": len(rates),
            "mean pass rate": sum(rates) / len(rates) if rates else None,
            "tasks with a pass rate above 0 and below 1": sum(0 < rate < 1 for rate in rates),
        },
    )
