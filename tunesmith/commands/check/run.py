"""Checks a workflow: runs it twice on one task with the same seed and looks for problems."""

from __future__ import annotations

from functools import partial
from itertools import groupby

from tunesmith.chat.renderer import Renderer
from tunesmith.commands.check.observe import Observation, observe_rollout
from tunesmith.commands.check.problems import find_problems
from tunesmith.commands.check.result import CheckedSample, Span, WorkflowCheck
from tunesmith.commands.doctor.finding import SEVERITIES
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import ConfigError
from tunesmith.experience.samples import build_samples
from tunesmith.runs.actors import load_actors
from tunesmith.runs.policy import BuildModel, check_policy
from tunesmith.tasks.load import load_tasks
from tunesmith.types import Group, JudgeType, Sample, Task, Trajectory, WorkflowType


def load_task(config: RunConfig, index: int) -> Task:
    """A row of the first training set."""
    if not config.training_sets:
        raise ConfigError(
            f"task {index} of which data set? Name one with --data FILE (train_dataset.path), or give the task itself "
            """as a JSON object: --task '{"question": "..."}'"""
        )
    name, section = next(iter(config.training_sets.items()))
    tasks = load_tasks(section, name=name)
    if not 0 <= index < len(tasks):
        raise ConfigError(f"task {index} does not exist: {section.path} has {len(tasks)} rows, 0 to {len(tasks) - 1}")
    return tasks[index]


def run_check(
    config: RunConfig, task: Task, *, workflow: WorkflowType, judge: JudgeType | None, build_model: BuildModel
) -> WorkflowCheck:
    """Run the workflow twice on the task; the first run's samples and the problems of both."""
    check_policy(config.model)
    policy, actors = load_actors(config, workflow=workflow, judge=judge, build_model=build_model)
    observe = partial(
        observe_rollout, task, config=config, policy=policy, agent=actors.agent,
        auxiliary_models=actors.auxiliary_models, build_model=build_model,
    )  # fmt: skip

    async def observe_twice() -> tuple[Observation, Observation]:
        return await observe(), await observe()

    first, second = run_lockstep(observe_twice(), config.rollout)
    trajectory, renderer = first.trajectory, policy.service.recorder.renderer
    findings = find_problems(first, second, config=config)
    return WorkflowCheck(
        task_id=task.task_id,
        model=config.model.path,
        num_turns=len(trajectory.turns),
        samples=tuple(describe_sample(sample, renderer) for sample in merge_turns(trajectory)),
        reward=trajectory.reward,
        metrics=trajectory.metrics,
        response_text=trajectory.response_text,
        seconds=trajectory.duration_s,
        findings=tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


def merge_turns(trajectory: Trajectory) -> list[Sample]:
    """The samples of the trajectory, as training builds them; also of one that failed."""
    return build_samples([Group(task=trajectory.task, trajectories=(trajectory,))], [[1.0]])[0]


def describe_sample(sample: Sample, renderer: Renderer) -> CheckedSample:
    spans = []
    for is_sampled, pairs in groupby(zip(sample.is_sampled, sample.token_ids, strict=True), key=lambda pair: pair[0]):
        ids = [token_id for _, token_id in pairs]
        spans.append(Span(is_sampled=is_sampled, num_tokens=len(ids), text=renderer.decode(ids)))
    return CheckedSample(spans=tuple(spans))
