"""Checks of time: idle engine, blocking code, stragglers, preemptions, evaluations, and dropped groups in flight
(`rollout.max_staleness`); and the parts of a step.
"""

from __future__ import annotations

from tunesmith.commands.doctor.record import CheckFinding, Evidence, Outcome, RlRun, format_settings, observe
from tunesmith.config import RunConfig

MAX_DROPPED_SHARE = 0.05
"""Dropped groups per trained one: slow groups are dropped more often, which biases what is trained; a few do not."""
MAX_SUGGESTED_STALENESS = 4
"""With more, steps are seldom faster, and samples are older."""


def find_dropped_groups(run: RlRun) -> Outcome:
    """Groups in flight that became too old to be trained; their tasks run again."""
    recent = run.need_recent("staleness/num_dropped_groups")
    algorithm, rollout = run.config.algorithm, run.config.rollout
    share = recent.total / (len(recent) * algorithm.batch_size)
    observed = f"{recent.total:.0f} groups, {share:.0%} of those that the steps train"
    if share <= MAX_DROPPED_SHARE:
        return f"dropped because their tokens became too old: {observed}"
    num_in_flight = algorithm.batch_size * algorithm.group_size * (1 + rollout.max_staleness)
    settings: dict[str, object] = {"rollout.max_concurrency": min(rollout.max_concurrency, num_in_flight) // 2}
    change = f"set {format_settings(settings)}, so that groups start later and take fewer steps"
    if rollout.max_staleness < MAX_SUGGESTED_STALENESS:
        settings = {"rollout.max_staleness": rollout.max_staleness + 1}
        change = f"set {format_settings(settings)}, or lower rollout.max_concurrency, so that groups take fewer steps"
    return CheckFinding(
        problem=f"{share:.0%} of the groups are dropped, because they took more than "
        f"rollout.max_staleness={rollout.max_staleness} steps: slow tasks are trained less than quick ones, and what "
        "was sampled for them is lost",
        evidence=(observe(recent, observed, share),),
        change=change,
        settings=settings,
    )


def can_be_stale(config: RunConfig) -> bool:
    """Whether the run may keep rollouts in flight: what the run file's checks allow, on one rank."""
    from tunesmith.algorithms.table import ALGORITHMS  # torch, which all other checks do without

    return (
        not ALGORITHMS[config.algorithm.algorithm_type].needs_current_weights
        and config.rollout.branching is None
        and config.serve is None
        and config.engine.kind == "tunesmith"
        and (config.experience.replay.num_groups == 0 or config.experience.replay.max_staleness <= 1)
    )


MAX_WAIT_SHARE, MIN_WAIT_S = 0.3, 0.2
"""Share of a step, and seconds of it, in which all workflows wait for something outside of the engine."""
MAX_CODE_SHARE, MIN_CODE_S = 0.7, 0.5
"""Share of a step, and seconds of it, in which the event loop runs Python code instead of the engine. Agent frameworks
take up to 0.6 with models of a few million parameters."""
STRAGGLER_FACTOR, MIN_STRAGGLER_S, MIN_ROLLOUT_SHARE = 4.0, 1.0, 0.5
"""A slowest rollout of four times the mean duration leaves the engine almost empty for most of the phase."""
MAX_PREEMPTION_SHARE = 0.05
MAX_EVALUATION_SHARE = 0.5
CONCURRENCY_FACTOR = 2


def find_idle_engine(run: RlRun) -> Outcome:
    """The engine idles while workflows wait for tools."""
    waited, step_s = run.need_recent("perf/tool_wait_s"), run.need_recent("perf/step_s")
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


def find_blocking_code(run: RlRun) -> Outcome:
    """Code of workflows and judges that keeps the event loop busy, so that the engine is not stepped."""
    names = ("tool_wait", "engine_busy", "rollout", "step")
    waited, busy, rollout_s, step_s = (run.need_recent(f"perf/{name}_s") for name in names)
    if not step_s.mean:
        return None
    code_s = rollout_s.mean - busy.mean - waited.mean
    observed = f"{max(code_s, 0):.2g} s of a step of {step_s.mean:.2g} s"
    if code_s < MAX_CODE_SHARE * step_s.mean or code_s < MIN_CODE_S:
        return f"Python code between engine steps takes {observed}"
    return CheckFinding(
        problem=f"Python code of workflows, judges and tools runs for {code_s / step_s.mean:.0%} of a step, and the "
        "engine waits for it",
        evidence=(
            Evidence(
                source=rollout_s.name, observed=f"{observed} are neither engine nor waiting", steps=rollout_s.span
            ),
        ),
        change="call tools that compute or block with `await asyncio.to_thread(...)` or in a process of their own; a "
        "synchronous call in a coroutine stops all other rollouts",
    )


def find_stragglers(run: RlRun) -> Outcome:
    """A few rollouts that take much longer than the others."""
    names = ("trajectory_s_max", "trajectory_s_mean", "rollout_s", "step_s")
    longest, mean, rollout_s, step_s = (run.need_recent(f"perf/{name}") for name in names)
    factor = longest.mean / mean.mean if mean.mean else 1.0
    observed = f"the slowest rollout of a step takes {longest.mean:.2g} s, the mean one {mean.mean:.2g} s"
    is_slow = factor > STRAGGLER_FACTOR and longest.mean - mean.mean > MIN_STRAGGLER_S
    if run.config.rollout.max_staleness:
        return f"{observed}, which steps do not wait for (rollout.max_staleness)"
    if not is_slow or rollout_s.mean < MIN_ROLLOUT_SHARE * step_s.mean:
        return observed
    timeout_s = max(1.0, round(2 * mean.mean + longest.mean / 2))
    settings: dict[str, object] = {"rollout.timeout_s": timeout_s}
    stale = ""
    if can_be_stale(run.config):
        settings["rollout.max_staleness"] = 1
        stale = "train on the groups that are complete with rollout.max_staleness=1, "
    return CheckFinding(
        severity="note",
        problem="each step waits for a few rollouts that take much longer than the others",
        evidence=(observe(longest, observed, factor),),
        change=f"{stale}limit turns and retries in the workflow, lower model.max_tokens, or set "
        f"rollout.timeout_s={timeout_s:g} (a rollout that times out counts as failed)",
        settings=settings,
    )


def find_preemptions(run: RlRun) -> Outcome:
    """Requests thrown out of a full KV cache and computed again."""
    recent, requests, share = run.need_share("engine/num_preemptions", "engine/num_requests")
    engine = run.config.engine
    observed = f"{recent.total:.0f} preemptions of {requests:.0f} requests"
    if share <= MAX_PREEMPTION_SHARE:
        return observed
    settings: dict[str, object] = {"engine.max_num_seqs": max(1, engine.max_num_seqs // 2)}
    if engine.kv_cache_tokens is not None:
        settings = {"engine.kv_cache_tokens": 2 * engine.kv_cache_tokens}
    elif engine.kv_cache_gib is not None:
        settings = {"engine.kv_cache_gib": 2 * engine.kv_cache_gib}
    listed = ", ".join(f"{knob}={value}" for knob, value in settings.items())
    return CheckFinding(
        problem="the KV cache is too small for the requests in flight, which are interrupted and computed again",
        evidence=(observe(recent, observed, share),),
        change=f"set {listed}",
        settings=settings,
    )


def find_slow_evaluation(run: RlRun) -> Outcome:
    """Evaluations that take longer than the training between them."""
    series, steps = run.metrics.get("perf/evaluation_s", "eval"), run.need("perf/step_s")
    if series is None or len(series.finite) < 2:
        return None
    total, train_s = series.finite.total, steps.total
    share = total / (total + train_s)
    observed = f"{total:.2g} s for {len(series)} evaluations, {train_s:.2g} s for {len(steps)} steps"
    if share <= MAX_EVALUATION_SHARE:
        return observed
    interval = 4 * max(run.config.evaluation.interval_steps, 1)
    return CheckFinding(
        severity="note",
        problem=f"evaluations take {share:.0%} of the run's time",
        evidence=(observe(series, observed, share),),
        change=f"set evaluation.interval_steps={interval}, or limit the tasks with evaluation.max_tasks",
        settings={"evaluation.interval_steps": interval},
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
