"""Checks of rollouts that end badly: the error that stopped the run, failed rollouts by cause, truncated responses,
prompts that do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from tunesmith.commands.doctor.record import (
    AnyRun,
    CheckFinding,
    Evidence,
    Outcome,
    RlRun,
    format_settings,
    observe,
)
from tunesmith.rollout.failures import list_causes
from tunesmith.runs.record import RunState
from tunesmith.types import TRUNCATED, Failure, FailureWhere

MAX_FAILURE_SHARE = 0.05
"""Servers and tools time out now and then; one rollout of twenty is more than that."""
NUM_READ_STEPS = 3
ADVICE: Mapping[FailureWhere, str] = {
    "workflow": "correct the line of the workflow named above; if it raises on tool results that the model caused, "
    "return them to the model as an observation",
    "judge": "correct the line of the judge named above; it must return a number for any response",
    "engine": "lower engine.max_num_seqs or engine.kv_cache_gib if memory is short, else report the message",
}


def find_stop(run: AnyRun) -> Outcome:
    """The error of a failed run, or that the run was interrupted."""
    # a fine-tuning resumes without being asked
    repeat = "repeat the command" + ("" if run.is_offline else " with --resume (continue_from_checkpoint=true)")
    if run.error is not None:
        message = " ".join(str(run.error["message"]).split())
        step = int(run.error["step"])
        return CheckFinding(
            severity="error",
            problem=f"the run failed at step {step} with a {run.error['error']}",
            evidence=(Evidence(source="error.json", observed=message, steps=(step, step)),),
            change=f"change what the message names, then {repeat}",
        )
    if run.state is RunState.INTERRUPTED:
        return CheckFinding(
            severity="note",
            problem="the run was interrupted or killed: it did not make and save all its steps, and recorded no error",
            evidence=(Evidence(source="metrics.jsonl", observed=f"the last step is {run.num_steps}"),),
            change=f"{repeat}; if the kernel killed it for its memory, lower "
            f"{'' if run.is_offline else 'engine.kv_cache_gib or '}trainer.max_tokens_per_row first",
            settings={} if run.is_offline else {"continue_from_checkpoint": True},
        )
    reason = "no error recorded" if run.stop_reason is None else run.stop_reason
    return f"{run.state}, {reason}"


def find_failures(run: RlRun) -> Outcome:
    """Rollouts without a reward, by boundary and cause."""
    on_disk = run.rollouts.list_steps()
    stopped_at = int(run.error["step"]) if run.error is not None and run.error["error"] == "RolloutError" else None
    if stopped_at is not None and stopped_at in on_disk:  # this step has no metrics
        causes = load_failures(run, [stopped_at])
        total: float | None = run.rollouts.read_table(stopped_at, ("run_index",)).num_rows
        counts = {where: float(len(causes.get(where, ()))) for where in get_args(FailureWhere)}
        steps: tuple[int, int] | None = (stopped_at, stopped_at)
    else:
        causes = load_failures(run, on_disk[-NUM_READ_STEPS:])
        total, recent = run.sum_recent("rollout/num_trajectories"), run.get_recent("rollout/num_failed")
        counts = {where: run.sum_recent(f"rollout/num_failed_{where}") or 0.0 for where in get_args(FailureWhere)}
        steps = None if recent is None else recent.span
    if not total:
        return None
    failed = sum(counts.values())
    if not failed:
        return f"none of {total:.0f} recent rollouts failed"
    by_boundary = ", ".join(f"{number:.0f} {where}" for where, number in counts.items() if number)
    evidence = [Evidence(source="rollout/num_failed", observed=by_boundary, value=failed, steps=steps)]
    evidence += [
        Evidence(source="rollouts/", observed=line) for failures in causes.values() for line in list_causes(failures)
    ]
    worst: FailureWhere = max(get_args(FailureWhere), key=lambda where: counts[where])
    advice, settings = ADVICE.get(worst), {}
    if advice is None:
        timeout_s = 2 * run.config.rollout.timeout_s
        settings = {"rollout.timeout_s": timeout_s}
        advice = f"set rollout.timeout_s={timeout_s:g}, or find out why the line named above takes so long"
    is_limit = stopped_at is not None and failed / total > run.config.rollout.max_failure_rate
    return CheckFinding(
        severity="error" if is_limit else "warning" if failed / total >= MAX_FAILURE_SHARE else "note",
        problem=f"{failed:.0f} of {total:.0f} recent rollouts ({failed / total:.1%}) failed, most of them at the "
        f"boundary `{worst}`",
        evidence=tuple(evidence),
        change=advice,
        settings=settings,
    )


def load_failures(run: RlRun, steps: Sequence[int]) -> dict[FailureWhere, list[Failure]]:
    """Failures of rollouts of steps on disk, by boundary."""
    found: dict[FailureWhere, list[Failure]] = {}
    for step in steps:
        table = run.rollouts.read_table(step, ("failure_where", "failure_message", "failure_line"))
        for row in table.to_pylist():
            if (where := row["failure_where"]) is not None:
                failure = Failure(where=where, message=row["failure_message"], line=row.get("failure_line"))
                found.setdefault(where, []).append(failure)
    return found


MAX_TRUNCATED_SHARE = 0.1
"""A few answers always ramble; from a tenth on the reward is partly a reward for brevity."""
MOSTLY_TRUNCATED_SHARE = 0.9
"""So few answers end that the judge sees hardly a whole one."""
MAX_REFUSED_SHARE = 0.01


def find_truncation(run: RlRun) -> Outcome:
    """Responses cut off by `max_tokens` or the context."""
    truncated, total = run.sum_recent("rollout/num_truncated"), run.sum_recent("rollout/num_trajectories")
    source, unit = "rollout/num_truncated", "rollouts"
    length, context = (run.need(f"rollout/num_stop_{name}").recent.total for name in ("length", "context"))
    if truncated is None:  # runs of earlier versions count turns only
        truncated, total = length + context, run.sum_recent("rollout/num_turns")
        source, unit = "rollout/num_stop_length", "turns"
    if not total:
        return None
    recent = run.need(source).recent
    share, longest = truncated / total, run.get_recent("rollout/sampled_tokens_per_turn_max")
    longest_text = "" if longest is None else f", the longest turn has {longest.values.max():.0f} tokens"
    if share < MAX_TRUNCATED_SHARE:
        return f"{share:.1%} of recent {unit} were truncated{longest_text}"
    model = run.config.model
    is_context = context > length or 2 * model.max_tokens > model.max_model_len
    knob = "model.max_model_len" if is_context else "model.max_tokens"
    value = 2 * (model.max_model_len if is_context else model.max_tokens)
    limit = f"the context, model.max_model_len={model.max_model_len}"
    if context <= length:
        limit = f"model.max_tokens={model.max_tokens}"
    settings: dict[str, object] = {knob: value}
    if is_context and length >= context:
        settings["model.max_tokens"] = 2 * model.max_tokens
    evidence = [
        observe(recent, f"{truncated:.0f} of {total:.0f} {unit}{longest_text}", share),
        Evidence(
            source="rollout/num_stop_context",
            observed=f"{context:.0f} turns ended at the end of the context, {length:.0f} at max_tokens",
            steps=recent.span,
        ),
    ]
    evidence += find_truncated_rollout(run)
    return CheckFinding(
        severity="error" if share >= MOSTLY_TRUNCATED_SHARE else "warning",
        problem=f"{share:.0%} of the recent {unit} were cut off at {limit}",
        evidence=tuple(evidence),
        change=f"set {format_settings(settings)}; if longer answers are not wanted, add experience.operators "
        "mask_response_truncated, so that a truncated answer is not trained as a wrong one",
        settings=settings,
    )


def find_truncated_rollout(run: RlRun) -> list[Evidence]:
    """A reference to a truncated rollout, if the rollouts are on disk."""
    for step in run.rollouts.list_steps()[-1:]:
        for row in run.rollouts.read_table(step, ("task_id", "run_index", "turns.stop_reason")).to_pylist():
            if row["turns"] and row["turns"][-1]["stop_reason"] in TRUNCATED:
                observed = f"task {row['task_id']}, run {row['run_index']} was truncated"
                return [Evidence(source=f"rollouts/step_{step:06d}.parquet", observed=observed, steps=(step, step))]
    return []


def find_refused_prompts(run: RlRun) -> Outcome:
    """Model calls refused because the prompt leaves no room for a token."""
    recent, num_calls = run.need("rollout/num_overlong").recent, run.need("rollout/num_calls").recent.total
    if not num_calls:
        return None
    if (share := recent.total / num_calls) < MAX_REFUSED_SHARE:
        return f"{recent.total:.0f} of {num_calls:.0f} recent calls had too long a prompt"
    value = 2 * run.config.model.max_model_len
    return CheckFinding(
        problem=f"{share:.0%} of the model calls were refused because their prompt fills the context",
        evidence=(observe(recent, f"{recent.total:.0f} of {num_calls:.0f} calls", share),),
        change=f"set model.max_model_len={value}, or let the workflow shorten its history and tool results",
        settings={"model.max_model_len": value},
    )
