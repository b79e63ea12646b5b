"""Measures of a tool agent's behavior from recorded numbers (ET-Agent, arXiv:2601.06860, section 4).

Each relates the correctness P of a rollout to what it cost: tool calls (efficiency), failed tool calls (successful
execution) or sampled tokens (reasoning length). The measure of a task set is the mean over its rollouts; a wrong answer
has the value 0 in each. Failed rollouts have no value. `evaluation.behavior` adds the measures to the metrics of
held-out rollouts, so that tables give them intervals and paired tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tunesmith.config import BehaviorSection
from tunesmith.errors import ConfigError
from tunesmith.experience.outcomes import compute_outcome, read_metric
from tunesmith.types import Group, Trajectory

MEASURES = ("efficiency", "successful_execution", "reasoning_length")
TOKENS = 1000
"""Reasoning length is correctness per this many tokens."""


def compute_efficiency(*, correctness: float, num_calls: float) -> float:
    """Correctness per tool call, `P / T`; P itself for a rollout without calls."""
    return correctness / num_calls if num_calls else correctness


def compute_successful_execution(*, correctness: float, num_errors: float) -> float:
    """Correctness per failed tool call, `P / max(failed, 1)`: one failed call costs nothing, two cost half."""
    return correctness / max(num_errors, 1.0)


def compute_reasoning_length(*, correctness: float, num_tokens: int) -> float | None:
    """Correctness per 1000 sampled tokens, `1000 * P / L`, higher for shorter reasoning; None without tokens."""
    return TOKENS * correctness / num_tokens if num_tokens else None


def measure_behavior(run: Trajectory, section: BehaviorSection, *, outcome_key: str | None) -> dict[str, float]:
    """The measures of a scored rollout by name."""

    def add_up(knob: str) -> float:
        return sum(read_metric(run, key, knob=f"evaluation.behavior.{knob}") for key in getattr(section, knob))

    correctness, num_calls, num_errors = compute_outcome(run, outcome_key), add_up("tool_keys"), add_up("error_keys")
    reasoning_length = compute_reasoning_length(
        correctness=correctness, num_tokens=sum(len(turn.sampled_ids) for turn in run.turns)
    )
    measures = {
        "efficiency": compute_efficiency(correctness=correctness, num_calls=num_calls),
        "successful_execution": compute_successful_execution(correctness=correctness, num_errors=num_errors),
    }
    return measures if reasoning_length is None else measures | {"reasoning_length": reasoning_length}


def add_behavior(groups: Sequence[Group], section: BehaviorSection | None, *, outcome_key: str | None) -> list[Group]:
    """The groups with the measures among the metrics of their scored rollouts; unchanged without a section."""
    if section is None:
        return list(groups)

    def add(run: Trajectory) -> Trajectory:
        if run.reward is None:
            return run
        measures = measure_behavior(run, section, outcome_key=outcome_key)
        taken = measures.keys() & run.metrics.keys()
        if taken:
            raise ConfigError(
                f"workflow or judge report the metric {min(taken)!r}, which evaluation.behavior measures too: rename "
                "it, or remove evaluation.behavior"
            )
        return replace(run, metrics={**run.metrics, **measures})

    return [replace(group, trajectories=tuple(map(add, group.trajectories))) for group in groups]
