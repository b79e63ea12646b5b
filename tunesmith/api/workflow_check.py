"""`tunesmith.check`: runs a workflow on one task and says what would keep it from training well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.commands.check.result import WorkflowCheck
from tunesmith.commands.check.run import load_task, run_check
from tunesmith.compat.agentscope_output import agent_output
from tunesmith.compat.chat_models import choose_chat_model
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.errors import ConfigError
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.run_files import load_run_file
from tunesmith.runs.load_config import change_section
from tunesmith.runs.load_function import load_functions
from tunesmith.types import JudgeType, Task, WorkflowType


def check(
    target: RunConfig | str | Path | WorkflowType,
    *,
    task: int | Mapping[str, Any] = 0,
    model: str | Path | None = None,
    judge: str | JudgeType | None = None,
    data: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> WorkflowCheck:
    """Run a workflow on one task, twice with the same seed, and find what would keep it from training well.

    `target` is a workflow, its name as `file.py:function` (`file.py` is its function `workflow`), a run file, or a
    RunConfig. `task` is the index of a row of the training set, or of the data set `data`, or the row itself as a
    mapping. `model` is the path of the model, and `overrides` ("a.b=value") set any key of a run file. Raises
    ConfigError if one of them is missing; errors of the workflow are findings. Nothing is trained or written.
    """
    settings, workflow = load_target(target, model=model, judge=judge, data=data, overrides=overrides)
    workflow, judge_func = load_functions(settings, workflow, judge if callable(judge) else None)
    check_workflow_function(workflow, allows_sync=True)
    if judge_func is not None:
        check_judge_function(judge_func)
    build_model = choose_chat_model(settings)
    row = load_task(settings, task) if isinstance(task, int) else Task(task_id="given", index=0, row=dict(task))
    with agent_output(is_shown=settings.rollout.has_agent_output):
        return run_outside_of_loops(
            lambda: run_check(settings, row, workflow=workflow, judge=judge_func, build_model=build_model)
        )


DEFAULT_WORKFLOW = "workflow"
"""The function of a Python file that is checked if none is named."""


def load_target(
    target: RunConfig | str | Path | WorkflowType,
    *,
    model: str | Path | None,
    judge: str | JudgeType | None,
    data: str | Path | None,
    overrides: Sequence[str],
) -> tuple[RunConfig, WorkflowType | None]:
    """The config of the check, and the workflow if it was passed as a function."""
    given = {"model.path": model, "judge": judge if isinstance(judge, str) else None, "train_dataset.path": data}
    changes = [*(f"{key}={value}" for key, value in given.items() if value is not None), *overrides]
    if isinstance(target, RunConfig):
        return change_section(target, changes), None
    is_file = isinstance(target, str | Path) and Path(target).suffix in (".yaml", ".yml")
    if is_file:
        return load_run_file(target, changes), None  # type: ignore[arg-type]  # a path, as just tested
    if not any(change.startswith("model.path=") for change in changes):
        raise ConfigError("model is missing: name the model that runs the workflow (--model, model=)")
    if isinstance(target, str):
        target = f"{target}:{DEFAULT_WORKFLOW}" if target.endswith(".py") else target
        return load_run_file(None, [f"workflow={target}", *changes]), None
    if isinstance(target, Path):
        raise ConfigError(f"{target} is not a run file (YAML); name a workflow as file.py:function")
    return load_run_file(None, changes), target
