"""Rollouts on held-out tasks with the current weights, during training and in `tunesmith eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunesmith.commands.eval.behavior import add_behavior
from tunesmith.commands.eval.results import EvaluationResult, compute_evaluation
from tunesmith.config import RunConfig
from tunesmith.rollout.dispatcher import Dispatcher
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.progress import RolloutProgress, StatusLine
from tunesmith.rollout.seeds import derive_seed
from tunesmith.runs.policy import build_sampling
from tunesmith.types import Group, Task


async def evaluate_all(
    config: RunConfig,
    dispatcher: Dispatcher,
    eval_tasks: Mapping[str, Sequence[Task]],
    *,
    policy_version: int,
    status: StatusLine | None = None,
) -> dict[str, EvaluationResult]:
    """Evaluate every held-out set. Seeds do not depend on the step, so all evaluations of a run use the same seeds."""
    results = {}
    for name, tasks in eval_tasks.items():
        groups = await run_held_out(config, dispatcher, name, tasks, policy_version=policy_version, status=status)
        results[name] = compute_evaluation(
            name,
            groups,
            policy_version=policy_version,
            seed=config.seed,
            outcome_key=config.experience.outcome_key,
        )
    return results


async def run_held_out(
    config: RunConfig,
    dispatcher: Dispatcher,
    name: str,
    tasks: Sequence[Task],
    *,
    policy_version: int,
    max_failure_rate: float = 1.0,
    status: StatusLine | None = None,
) -> list[Group]:
    """Run one held-out set."""
    requests = build_requests(
        tasks,
        size=config.evaluation.num_samples,
        seed=derive_seed(config.seed, "evaluation", name),
        sampling=build_sampling(config.model, temperature=config.evaluation.temperature),
    )
    groups = await dispatcher.evaluate(
        requests,
        policy_version=policy_version,
        max_failure_rate=max_failure_rate,
        progress=RolloutProgress(status=status),
    )
    return add_behavior(groups, config.evaluation.behavior, outcome_key=config.experience.outcome_key)
