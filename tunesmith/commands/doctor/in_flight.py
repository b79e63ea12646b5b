"""Checks of rollouts in flight over several steps (`rollout.max_staleness`)."""

from __future__ import annotations

from tunesmith.commands.doctor.finding import Evidence, Finding, Outcome, Passed, format_settings
from tunesmith.commands.doctor.record import RlRun
from tunesmith.config import RunConfig

MAX_DROPPED_SHARE = 0.05
"""Dropped groups per trained one: slow groups are dropped more often, which biases what is trained; a few do not."""
MAX_SUGGESTED_STALENESS = 4
"""With more, steps are seldom faster, and samples are older."""


def find_dropped_groups(run: RlRun) -> Outcome:
    """Groups in flight that became too old to be trained; their tasks run again."""
    dropped, recent = run.sum_recent("staleness/num_dropped_groups"), run.get_recent("staleness/num_dropped_groups")
    if dropped is None or recent is None:
        return None
    algorithm, rollout = run.config.algorithm, run.config.rollout
    share = dropped / (len(recent) * algorithm.batch_size)
    observed = f"{dropped:.0f} groups, {share:.0%} of those that the steps train"
    if share <= MAX_DROPPED_SHARE:
        return Passed(check="dropped-groups", figure=f"dropped because their tokens became too old: {observed}")
    num_in_flight = algorithm.batch_size * algorithm.group_size * (1 + rollout.max_staleness)
    settings: dict[str, object] = {"rollout.max_concurrency": min(rollout.max_concurrency, num_in_flight) // 2}
    change = f"set {format_settings(settings)}, so that groups start later and take fewer steps"
    if rollout.max_staleness < MAX_SUGGESTED_STALENESS:
        settings = {"rollout.max_staleness": rollout.max_staleness + 1}
        change = f"set {format_settings(settings)}, or lower rollout.max_concurrency, so that groups take fewer steps"
    return Finding(
        check="dropped-groups",
        severity="warning",
        problem=f"{share:.0%} of the groups are dropped, because they took more than "
        f"rollout.max_staleness={rollout.max_staleness} steps: slow tasks are trained less than quick ones, and what "
        "was sampled for them is lost",
        evidence=(Evidence(source=recent.name, observed=observed, value=share, steps=recent.span),),
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
