"""The check of time, an engine that idles while tools run; and the parts of a step."""

from __future__ import annotations

from tunesmith.commands.doctor.record import CheckFinding, Outcome, RlRun, format_settings, observe

MAX_WAIT_SHARE, MIN_WAIT_S = 0.3, 0.2
"""Share of a step, and seconds of it, in which all workflows wait for something outside of the engine."""
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
