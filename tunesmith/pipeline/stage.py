"""The stage on which agents act: the trained model, its helpers, the user's functions, and running tasks on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tunesmith.config import RunConfig
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.threads import set_num_threads
from tunesmith.pipeline.evaluate import EvaluationResult, compute_evaluation
from tunesmith.pipeline.policy import Auxiliary, BuildModel, Policy, build_sampling, load_auxiliary, load_policy
from tunesmith.rollout.groups import attach_baselines, run_groups
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import ModelService
from tunesmith.types import Group, JudgeType, Sampling, Task, Trajectory, WorkflowType


class StatusLine(Protocol):
    """Where progress is told."""

    def show_status(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything that a rollout needs."""

    policy: Policy
    auxiliaries: Mapping[str, Auxiliary]
    agent: Agent
    max_concurrency: int
    http_port: int | None
    """Where models are served over HTTP while workflows run; None serves them in process only."""
    max_body_bytes: int
    """Of a request over HTTP."""

    @property
    def engines(self) -> list[LocalEngine]:
        """The engines of all local models, the trained one first."""
        helpers = [auxiliary.engine for auxiliary in self.auxiliaries.values() if auxiliary.engine is not None]
        return [self.policy.engine, *helpers]


def load_stage(config: RunConfig, *, workflow: WorkflowType, judge: JudgeType | None, build_model: BuildModel) -> Stage:
    """Load the models of a run."""
    set_num_threads(config.num_cpu_threads)
    policy = load_policy(config.model, config.engine, build_model=build_model)
    auxiliaries = {
        name: load_auxiliary(section, config.engine, device=config.model.device, build_model=build_model)
        for name, section in config.auxiliary_models.items()
    }
    agent = Agent(workflow=workflow, judge=judge, timeout_s=config.rollout.timeout_s)
    return Stage(
        policy=policy,
        auxiliaries=auxiliaries,
        agent=agent,
        max_concurrency=config.rollout.max_concurrency,
        http_port=config.rollout.http_port,
        max_body_bytes=int(config.rollout.max_body_mib * 2**20),
    )


async def collect_groups(
    stage: Stage,
    tasks: Sequence[Task],
    *,
    group_size: int,
    seed: int,
    step: int,
    monitor: StatusLine | None = None,
    sampling: Sampling | None = None,
    baseline_sampling: Sampling | None = None,
    finished: list[Trajectory] | None = None,
) -> list[Group]:
    """Run the agent `group_size` times on each task. The trained model's engine must be sampling.

    With `baseline_sampling` one more run of each task gives its group's baseline reward. `finished` gets each other
    trajectory as it ends, so that what there is can be kept where the phase does not end.
    """
    for engine in stage.engines[1:]:
        engine.resume(0)  # helpers never change; an empty prefix cache makes a phase a function of its seed
    num_expected, num_done = len(tasks) * (group_size + (baseline_sampling is not None)), 0

    def count(trajectory: Trajectory) -> None:
        nonlocal num_done
        num_done += 1
        if monitor is not None:
            monitor.show_status(f"{num_done}/{num_expected} rollouts")

    def keep(trajectory: Trajectory) -> None:
        count(trajectory)
        if finished is not None:
            finished.append(trajectory)

    async with AsyncExitStack() as serving:
        if stage.http_port is not None:
            helpers = [each.source for each in stage.auxiliaries.values() if isinstance(each.source, ModelService)]
            ports = {stage.policy.service: stage.http_port} | dict.fromkeys(helpers, 0)
            for service, port in ports.items():
                served = service.serve(port=port, max_body_bytes=stage.max_body_bytes)
                await serving.enter_async_context(served)
        run = partial(
            run_groups,
            tasks,
            agent=stage.agent,
            model=stage.policy.service,
            auxiliary_models={name: auxiliary.source for name, auxiliary in stage.auxiliaries.items()},
            step=step,
            max_concurrency=stage.max_concurrency,
        )
        groups = await run(group_size=group_size, seed=seed, sampling=sampling, on_progress=keep)
        if baseline_sampling is None:
            return groups
        baselines = await run(
            group_size=1, seed=derive_seed(seed, "baseline"), sampling=baseline_sampling, on_progress=count
        )
        return attach_baselines(groups, baselines)


async def evaluate_all(
    config: RunConfig,
    stage: Stage,
    eval_tasks: Mapping[str, Sequence[Task]],
    *,
    policy_version: int,
    monitor: StatusLine | None = None,
) -> dict[str, EvaluationResult]:
    """Try every held-out set with the weights as they are; the draws are the same at every evaluation."""
    results = {}
    for name, tasks in eval_tasks.items():
        groups = await try_held_out(config, stage, name, tasks, policy_version=policy_version, monitor=monitor)
        results[name] = compute_evaluation(
            name,
            groups,
            policy_version=policy_version,
            seed=config.seed,
            outcome_key=config.experience.outcome_key,
        )
    return results


async def try_held_out(
    config: RunConfig,
    stage: Stage,
    name: str,
    tasks: Sequence[Task],
    *,
    policy_version: int,
    monitor: StatusLine | None = None,
) -> list[Group]:
    """Try one held-out set; what was counted meanwhile does not count as training."""
    stage.policy.engine.resume(policy_version)
    groups = await collect_groups(
        stage,
        tasks,
        group_size=config.evaluation.num_samples,
        seed=derive_seed(config.seed, "evaluation", name),
        step=0,
        monitor=monitor,
        sampling=build_sampling(config.model, temperature=config.evaluation.temperature),
    )
    stage.policy.engine.pause()
    stage.policy.engine.compute_stats()
    stage.policy.service.recorder.compute_stats()
    return groups
