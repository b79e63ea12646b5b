"""The check of time, an engine that idles while tools run; the table of checks, and the diagnosis of a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tunesmith.commands.doctor import failures, optimizer, rewards
from tunesmith.commands.doctor.record import (
    CheckedRun,
    CheckFinding,
    Diagnosis,
    NotRecordedError,
    Outcome,
    Passed,
    RlRun,
    format_settings,
    name_findings,
    observe,
    open_run,
)
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError

if TYPE_CHECKING:
    from tunesmith.commands.doctor.plan import MemoryPlan
    from tunesmith.runs.result import TrainingResult


MAX_WAIT_SHARE, MIN_WAIT_S = 0.3, 0.2
"""Share of a step, and seconds of it, in which all workflows wait for something outside of the engine."""
CONCURRENCY_FACTOR = 2


def find_idle_engine(run: RlRun) -> Outcome:
    """The engine idles while workflows wait for tools."""
    waited, step_s = run.need("perf/tool_wait_s").recent, run.need("perf/step_s").recent
    share = waited.mean / step_s.mean if step_s.mean else 0.0
    observed = f"{waited.mean:.2g} s of a step of {step_s.mean:.2g} s"
    if share < MAX_WAIT_SHARE or waited.mean < MIN_WAIT_S:
        return f"all workflows wait for tools or servers for {observed}"
    algorithm, rollout = run.config.algorithm, run.config.rollout
    num_rollouts = algorithm.batch_size * algorithm.group_size
    if num_rollouts > rollout.max_concurrency:
        settings = {"rollout.max_concurrency": min(CONCURRENCY_FACTOR * rollout.max_concurrency, num_rollouts)}
    else:
        settings = {"algorithm.batch_size": CONCURRENCY_FACTOR * algorithm.batch_size}
    evidence = [observe(waited, observed, share)]
    if (idle := run.get_recent("perf/engine_idle_s")) is not None:
        text = f"the engine has no request for {idle.mean:.2g} s of a step"
        evidence.append(observe(idle, text, idle.mean))
    return CheckFinding(
        problem=f"the engine is idle for {share:.0%} of a step, while all workflows wait for tools, servers or timers",
        evidence=tuple(evidence),
        change=f"make tools and judges faster, or let more rollouts sample meanwhile with {format_settings(settings)}",
        settings=settings,
    )


def describe_step_time(run: RlRun) -> str | None:
    """Where the time of recent steps goes."""
    total, rollout, train = (run.get_recent(f"perf/{name}_s") for name in ("step", "rollout", "train"))
    if train is None:
        return None
    if total is None or rollout is None:
        return f"{train.mean:.2g} s"
    busy, waited = run.get_recent("perf/engine_busy_s"), run.get_recent("perf/tool_wait_s")
    parts = "" if busy is None else f"engine {busy.mean:.2g} s"
    if busy is not None and waited is not None:
        code_s = max(rollout.mean - busy.mean - waited.mean, 0.0)
        parts += f", waiting for tools {waited.mean:.2g} s, code between engine steps {code_s:.2g} s"
    return f"{total.mean:.2g} s: rollouts {rollout.mean:.2g} s ({parts}), training {train.mean:.2g} s"


Check = Callable[[CheckedRun[Any]], Outcome]

SHARED_CHECKS: Mapping[str, Check] = {
    "stopped": failures.find_stop,
    "learning-rate": optimizer.find_dead_learning_rate,
}
"""Checks of every run, by the name that their outcome has."""
RL_CHECKS: Mapping[str, Check] = {
    "failures": failures.find_failures,
    "equal-rewards": rewards.find_equal_rewards,
    "reward-trend": rewards.find_reward_trend,
    "truncation": failures.find_truncation,
    "refused-prompts": failures.find_refused_prompts,
    "mismatch": optimizer.find_mismatch,
    "entropy": optimizer.find_entropy,
    "kl": optimizer.find_kl,
    "evaluation": rewards.find_evaluation_trend,
    "idle-engine": find_idle_engine,
}
OFFLINE_CHECKS: Mapping[str, Check] = {
    "loss": optimizer.find_loss_trend,
}


@overload
def diagnose(run: str | Path | TrainingResult) -> Diagnosis: ...


@overload
def diagnose(
    *, plan: str | Path | RunConfig, memory_gib: float | None = None, overrides: Sequence[str] = ()
) -> MemoryPlan: ...


def diagnose(
    run: str | Path | TrainingResult | None = None,
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


def check_run(run: str | Path | TrainingResult) -> Diagnosis:
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
