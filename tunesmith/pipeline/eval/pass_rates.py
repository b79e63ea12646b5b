"""Pass rates of a model on a training set, as a field of its rows: the features that selectors start from.

Every task is tried a number of times with the weights as they are; nothing is trained, and the set's own operators are
left for the run that trains. Rows go to a file beside the
output batch by batch, so a kill loses one batch: the same command goes on after the last whole one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import ConfigError, DataError
from tunesmith.experience.outcomes import compute_pass_rates
from tunesmith.pipeline.session.actors import load_actors
from tunesmith.pipeline.session.policy import BuildModel, check_policy
from tunesmith.rollout.actors import Actors, run_tasks
from tunesmith.rollout.groups import check_failures
from tunesmith.storage import load_json_lines, save_text, storage_errors
from tunesmith.tasks.load import load_tasks
from tunesmith.types import JudgeType, Task, WorkflowType


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRates:
    """What a measurement leaves."""

    path: Path
    num_rows: int
    num_unscored: int
    """Tasks of which no run has a score; their rows are left out."""


def measure_pass_rates(
    config: RunConfig,
    *,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    field: str,
    num_runs: int,
    out: Path,
) -> PassRates:
    """Write the rows of the training set with the model's pass rate under `field`."""
    tasks = load_training_tasks(config, field=field)
    if out.exists():
        raise ConfigError(f"{out} is there already; choose another file")
    check_policy(config.model)
    part = out.with_name(f"{out.name}.part")
    batch_size = config.algorithm.batch_size
    with storage_errors(part, "write"):
        out.parent.mkdir(parents=True, exist_ok=True)
        num_done = count_done(part, batch_size)
    _, actors = load_actors(config, workflow=workflow, judge=judge, build_model=build_model)

    async def measure() -> None:
        for start in range(num_done, len(tasks), batch_size):
            rates = await try_tasks(config, actors, tasks[start : start + batch_size], num_runs=num_runs, step=start)
            append_batch(part, [list(pair) for pair in zip(range(start, start + batch_size), rates, strict=False)])

    run_lockstep(measure(), config.rollout)
    return finish(part, tasks, field=field, out=out)


def load_training_tasks(config: RunConfig, *, field: str) -> list[Task]:
    """The one training set, whose rows must not have the field yet."""
    if config.train_dataset is None:
        raise ConfigError("pass rates are measured on train_dataset; set train_dataset.path")
    tasks = load_tasks(config.train_dataset, name="train")
    if any(field in task.row for task in tasks):
        raise DataError(
            f"the rows of {config.train_dataset.path!r} have a field {field!r} already; choose another name"
        )
    return tasks


async def try_tasks(
    config: RunConfig, actors: Actors, tasks: Sequence[Task], *, num_runs: int, step: int
) -> list[float | None]:
    actors.engine.resume(0)
    groups = await run_tasks(actors, tasks, group_size=num_runs, seed=config.seed, step=step)
    actors.engine.pause()
    check_failures(groups, max_failure_rate=config.rollout.max_failure_rate)
    return compute_pass_rates(groups, config.experience.outcome_key)


def append_batch(part: Path, pairs: Sequence[Sequence[Any]]) -> None:
    """One line a batch: pairs of place and pass rate."""
    with storage_errors(part, "write"), part.open("a", encoding="utf-8") as file:
        file.write(json.dumps(pairs) + "\n")


def count_done(part: Path, batch_size: int) -> int:
    """Tasks in whole lines; what a kill cut short is removed."""
    if not part.exists():
        return 0
    text = part.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        part.write_text(whole, encoding="utf-8")
    sizes = [len(batch) for batch in load_json_lines(part)]
    if any(size != batch_size for size in sizes[:-1]):
        raise ConfigError(f"{part} was begun with another algorithm.batch_size than {batch_size}; remove it")
    return sum(sizes)


def finish(part: Path, tasks: Sequence[Task], *, field: str, out: Path) -> PassRates:
    """Join rows and pass rates into `out`, and remove the part."""
    rates = [rate for batch in load_json_lines(part) for _, rate in batch]
    rows = [
        json.dumps({**task.row, field: rate}, ensure_ascii=False, default=str)
        for task, rate in zip(tasks, rates, strict=True)
        if rate is not None
    ]
    save_text(out, "".join(f"{row}\n" for row in rows))
    with storage_errors(part, "remove"):
        part.unlink()
    return PassRates(path=out, num_rows=len(rows), num_unscored=len(tasks) - len(rows))
