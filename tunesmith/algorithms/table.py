"""The one place where algorithms have names.

A line of the table pairs an advantage function with a loss function. The arguments a user may set are the keyword
arguments of those functions, with their types, ranges and defaults; `resolve_algorithm` refuses all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.algorithms.advantages import (
    Advantages,
    RunOutcome,
    compute_grpo_advantages,
    compute_multi_step_grpo_advantages,
)
from tunesmith.algorithms.aggregate import Aggregation
from tunesmith.algorithms.kl import KlEstimator
from tunesmith.algorithms.losses import TokenLosses, TokenScores, compute_ppo_clip_losses, compute_sft_losses
from tunesmith.arguments import bind_arguments, name_nearest
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError
from tunesmith.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmEntry:
    """A line of the table."""

    compute_advantages: Callable[..., Advantages] | None
    """None learns from given answers, not from rewards."""
    compute_losses: Callable[..., TokenLosses]
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    """Where the algorithm's own defaults differ from the loss function's."""
    aggregation: Aggregation = "token-mean"


ALGORITHMS: dict[str, AlgorithmEntry] = {
    "grpo": AlgorithmEntry(compute_advantages=compute_grpo_advantages, compute_losses=compute_ppo_clip_losses),
    "multi_step_grpo": AlgorithmEntry(
        compute_advantages=compute_multi_step_grpo_advantages, compute_losses=compute_ppo_clip_losses
    ),
    "sft": AlgorithmEntry(compute_advantages=None, compute_losses=compute_sft_losses),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm with all its arguments bound."""

    name: str
    compute_advantages: Callable[[Sequence[Sequence[RunOutcome]]], Advantages] | None
    compute_losses: Callable[[TokenScores], TokenLosses]
    aggregation: Aggregation
    kl_coef: float
    kl_estimator: KlEstimator
    entropy_coef: float

    @property
    def is_supervised(self) -> bool:
        """It learns from given answers: tokens have no sampler's logprob and no advantage."""
        return self.compute_advantages is None


def resolve_algorithm(section: AlgorithmSection) -> Algorithm:
    """Look the name up and bind the arguments; what is not known is a ConfigError that names the nearest known."""
    name = section.algorithm_type
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm_type {name!r}: {name_nearest(name, list(ALGORITHMS))}")
    entry = ALGORITHMS[name]
    compute_advantages = None
    if entry.compute_advantages is not None:
        compute_advantages = bind_arguments(
            entry.compute_advantages, section.advantage_args, where=f"advantage_args of {name!r}"
        )
    elif section.advantage_args:
        raise ConfigError(f"advantage_args of {name!r}: it takes none, because it computes no advantages")
    loss_args = {**entry.loss_args, **section.loss_args}
    return Algorithm(
        name=name,
        compute_advantages=compute_advantages,
        compute_losses=bind_arguments(entry.compute_losses, loss_args, where=f"loss_args of {name!r}"),
        aggregation=section.loss_aggregation or entry.aggregation,
        kl_coef=section.kl_coef,
        kl_estimator=section.kl_estimator,
        entropy_coef=section.entropy_coef,
    )


def compute_group_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> tuple[Advantages, dict[str, float]]:
    """Advantages of every trajectory, and how many groups train, were dropped, or had no score at all."""
    if algorithm.compute_advantages is None:
        raise ConfigError(f"algorithm_type={algorithm.name!r} does not learn from rewards; choose grpo or another")
    outcomes = [
        [RunOutcome(reward=run.reward, num_steps=len(run.turns)) for run in group.trajectories] for group in groups
    ]
    advantages = algorithm.compute_advantages(outcomes)
    is_trained = [any(value is not None for value in row) for row in advantages]
    num_unscored = sum(not group.scored for group in groups)
    metrics = {
        "algorithm/num_trained_groups": float(sum(is_trained)),
        "algorithm/num_dropped_groups": float(len(groups) - sum(is_trained) - num_unscored),
        "algorithm/num_unscored_groups": float(num_unscored),
    }
    return advantages, metrics


def describe_algorithms() -> str:
    """The table as text: each algorithm's functions, their arguments and defaults, and its aggregation."""
    lines = []
    for name, entry in ALGORITHMS.items():
        lines.append(f"{name}  (aggregation {entry.aggregation})")
        if entry.compute_advantages is not None:
            lines.append(f"    advantage_args: {_describe_arguments(entry.compute_advantages, {})}")
        lines.append(f"    loss_args: {_describe_arguments(entry.compute_losses, entry.loss_args)}")
    return "\n".join(lines)


def _describe_arguments(function: Callable[..., Any], changed: Mapping[str, Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    arguments = [
        f"{parameter.name}={changed.get(parameter.name, parameter.default)!r}"
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    return ", ".join(arguments) or "none"
