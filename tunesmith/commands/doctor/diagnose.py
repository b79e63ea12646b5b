"""The table of checks, and the diagnosis of a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tunesmith.commands.doctor.failures import (
    find_failures,
    find_late_calls,
    find_length_growth,
    find_refused_prompts,
    find_stop,
    find_truncation,
)
from tunesmith.commands.doctor.optimizer import (
    find_dead_learning_rate,
    find_entropy,
    find_evaluation_loss,
    find_gradients,
    find_kl,
    find_large_updates,
    find_loss_trend,
    find_mismatch,
    find_stale_samples,
)
from tunesmith.commands.doctor.record import (
    CheckedRun,
    Diagnosis,
    NotRecordedError,
    Outcome,
    Passed,
    name_findings,
    open_run,
)
from tunesmith.commands.doctor.rewards import (
    find_branches,
    find_equal_rewards,
    find_evaluation_trend,
    find_repeated_tasks,
    find_reward_trend,
    find_small_batch,
)
from tunesmith.commands.doctor.speed import (
    describe_step_time,
    find_blocking_code,
    find_dropped_groups,
    find_idle_engine,
    find_preemptions,
    find_slow_evaluation,
    find_stragglers,
)
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError

if TYPE_CHECKING:
    from tunesmith.commands.doctor.plan import MemoryPlan

Check = Callable[[CheckedRun[Any]], Outcome]

SHARED_CHECKS: Mapping[str, Check] = {
    "stopped": find_stop,
    "learning-rate": find_dead_learning_rate,
    "gradients": find_gradients,
}
"""Checks of every run, by the name that their outcome has."""
RL_CHECKS: Mapping[str, Check] = {
    "failures": find_failures,
    "equal-rewards": find_equal_rewards,
    "small-batch": find_small_batch,
    "reward-trend": find_reward_trend,
    "truncation": find_truncation,
    "refused-prompts": find_refused_prompts,
    "length-growth": find_length_growth,
    "mismatch": find_mismatch,
    "entropy": find_entropy,
    "kl": find_kl,
    "update-size": find_large_updates,
    "stale-samples": find_stale_samples,
    "dropped-groups": find_dropped_groups,
    "evaluation": find_evaluation_trend,
    "branches": find_branches,
    "task-pool": find_repeated_tasks,
    "late-calls": find_late_calls,
    "idle-engine": find_idle_engine,
    "blocking-code": find_blocking_code,
    "stragglers": find_stragglers,
    "preemptions": find_preemptions,
    "evaluation-time": find_slow_evaluation,
}
OFFLINE_CHECKS: Mapping[str, Check] = {"loss": find_loss_trend, "evaluation-loss": find_evaluation_loss}


class RunResult(Protocol):
    """Result of `tune()`, `sft()` or `prefer()`."""

    @property
    def folder(self) -> Path: ...


def diagnose(
    run: str | Path | RunResult | None = None,
    *,
    plan: str | Path | RunConfig | None = None,
    memory_gib: float | None = None,
    overrides: Sequence[str] = (),
) -> Diagnosis | MemoryPlan:
    """Check a run by its folder, a checkpoint or model in it, or its result; StorageError if there is no run.

    With `plan`, a run file or a model, say instead whether its training fits a card of `memory_gib` GiB, or the device
    of this machine; `overrides` change keys of the run file.
    """
    if (run is None) == (plan is None):
        raise ConfigError("give either the folder of a run, or plan: a run file or a model (--plan FILE)")
    if plan is not None:
        from tunesmith.commands.doctor.plan import plan_memory  # torch, which the checks of a folder do without

        return plan_memory(plan, memory_gib=memory_gib, overrides=overrides)
    if memory_gib is not None or overrides:
        raise ConfigError("memory_gib and overrides (--memory, --set) have no effect without plan (--plan FILE)")
    assert run is not None
    return check_run(run)


def check_run(run: str | Path | RunResult) -> Diagnosis:
    """The outcomes of all checks of a run."""
    record = open_run(Path(run if isinstance(run, str | Path) else run.folder).expanduser().absolute())
    checks = {**SHARED_CHECKS, **(OFFLINE_CHECKS if record.is_offline else RL_CHECKS)}
    outcomes = {name: run_check(check, record) for name, check in checks.items()}
    return Diagnosis(
        folder=record.root,
        state=record.state,
        num_steps=record.num_steps,
        total_steps=record.total_steps,
        findings=name_findings(outcomes),
        passed=tuple(Passed(check=name, figure=each) for name, each in outcomes.items() if isinstance(each, str)),
        not_checked=tuple(name for name, each in outcomes.items() if each is None),
        step_time=describe_step_time(record),
    )


def run_check(check: Check, run: CheckedRun[Any]) -> Outcome:
    """The outcome of a check; None if a metric that it needs is not recorded."""
    try:
        return check(run)
    except NotRecordedError:
        return None
