"""Checks a workflow: runs it twice on one task with the same seed and looks for problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from tunesmith.chat.renderer import Renderer
from tunesmith.commands.check.problems import Observation, find_problems, observe_rollout
from tunesmith.commands.doctor.record import CheckFinding, format_findings
from tunesmith.commands.settings import load_run_file
from tunesmith.compat.chat_models import agent_output, choose_chat_model
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.errors import ConfigError
from tunesmith.experience.samples import build_samples
from tunesmith.model.load import check_section
from tunesmith.runs.load_config import change_section
from tunesmith.runs.load_function import load_functions
from tunesmith.runs.policy import BuildModel, load_actors
from tunesmith.runs.tasks import load_run_tasks
from tunesmith.types import Group, JudgeType, Sample, Task, WorkflowType


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens of a sample with the same mask."""

    is_sampled: bool
    """Whether the model sampled these tokens, so that they are trained; the others are context."""
    num_tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSample:
    """One training sample: turns of the rollout that extend each other."""

    spans: tuple[TokenSpan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans if span.is_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowCheck:
    """All that `tunesmith check` says about a workflow."""

    task_id: str
    model: str
    num_turns: int
    samples: tuple[CheckedSample, ...]
    """Samples of the first of the two runs; they would be trained if it has a reward."""
    reward: float | None
    """None if the rollout failed: nothing of it would be trained."""
    metrics: Mapping[str, float]
    response_text: str
    seconds: float
    """Time of the first run."""
    findings: tuple[CheckFinding, ...]
    """Most severe first."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """The samples with their masks, the reward, the findings."""
        lines = [f"task {self.task_id}, model {self.model}: {self.num_turns} turns in {self.seconds:.1f} s"]
        for number, sample in enumerate(self.samples, start=1):
            counts = f"{sample.num_tokens} tokens, {sample.num_sampled_tokens} sampled by the model"
            lines += ["", f"sample {number}: {counts}"]
            for span in sample.spans:
                lines.append(f"--- {'sampled' if span.is_sampled else 'context'}, {span.num_tokens} tokens")
                lines.append(span.text)
        is_trained = self.reward is not None
        lines += ["", f"response: {self.response_text}", f"reward: {self.reward if is_trained else 'none'}"]
        lines += [f"metric {name}: {value:g}" for name, value in self.metrics.items()]
        num_trained = sum(sample.num_sampled_tokens for sample in self.samples) if is_trained else 0
        lines.append(f"tokens that would be trained: {num_trained}")
        return "\n".join(lines + format_findings(self.findings, otherwise="no problem found"))


DEFAULT_WORKFLOW = "workflow"
"""The function of a Python file that is checked if none is named."""


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
    build_model = choose_chat_model(settings.rollout.chat_model)
    if isinstance(task, int):
        row = load_task(settings, task)
    else:
        row = Task(task_id="given", index=0, row=dict(task))
    with agent_output(is_shown=settings.rollout.has_agent_output):
        return run_outside_of_loops(
            lambda: run_check(settings, row, workflow=workflow, judge=judge_func, build_model=build_model)
        )


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


def load_task(config: RunConfig, index: int) -> Task:
    """A row of the first training set."""
    if not config.training_sets:
        raise ConfigError(
            f"task {index} of which data set? Name one with --data FILE (train_dataset.path), or give the task itself "
            """as a JSON object: --task '{"question": "..."}'"""
        )
    name, section = next(iter(config.training_sets.items()))
    tasks = load_run_tasks(config, section, name=name)
    if not 0 <= index < len(tasks):
        raise ConfigError(f"task {index} does not exist: {section.path} has {len(tasks)} rows, 0 to {len(tasks) - 1}")
    return tasks[index]


def run_check(
    config: RunConfig, task: Task, *, workflow: WorkflowType, judge: JudgeType | None, build_model: BuildModel
) -> WorkflowCheck:
    """Run the workflow twice on the task; the first run's samples and the problems of both."""
    check_section(config.model)
    policy, actors = load_actors(config, workflow=workflow, judge=judge, build_model=build_model)
    observe = partial(observe_rollout, config, task, policy=policy, actors=actors, build_model=build_model)

    async def observe_twice() -> tuple[Observation, Observation]:
        return await observe(), await observe()

    with closing(policy):
        first, second = run_lockstep(observe_twice(), config.rollout)
    trajectory, renderer = first.trajectory, policy.service.recorder.renderer
    # as training merges turns, also of a rollout that failed
    samples, _ = build_samples([Group(task=task, trajectories=(trajectory,))], [[1.0]])
    return WorkflowCheck(
        task_id=task.task_id,
        model=config.model.path,
        num_turns=len(trajectory.turns),
        samples=tuple(describe_sample(sample, renderer) for sample in samples),
        reward=trajectory.reward,
        metrics=trajectory.metrics,
        response_text=trajectory.response_text,
        seconds=trajectory.duration_s,
        findings=find_problems(first, second, timeout_s=config.rollout.timeout_s),
    )


def describe_sample(sample: Sample, renderer: Renderer) -> CheckedSample:
    spans = []
    for is_sampled, pairs in groupby(zip(sample.is_sampled, sample.token_ids, strict=True), key=lambda pair: pair[0]):
        ids = [token_id for _, token_id in pairs]
        spans.append(TokenSpan(is_sampled=is_sampled, num_tokens=len(ids), text=renderer.decode(ids)))
    return CheckedSample(spans=tuple(spans))
