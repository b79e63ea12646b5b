"""The one place where algorithms have names.

A line of the table pairs an advantage function with a loss function. The arguments a user may set are the keyword
arguments of those functions, with their types, ranges and defaults; `resolve_algorithm` refuses all others.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tunesmith.algorithms.advantages import (
    Advantages,
    RunOutcome,
    compute_grpo_advantages,
    compute_multi_step_grpo_advantages,
)
from tunesmith.algorithms.aggregate import Aggregation
from tunesmith.algorithms.kl import KlEstimator
from tunesmith.algorithms.losses import TokenLosses, TokenScores, compute_ppo_clip_losses, compute_sft_losses
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
        raise ConfigError(f"unknown algorithm_type {name!r}: {_name_nearest(name, list(ALGORITHMS))}")
    entry = ALGORITHMS[name]
    compute_advantages = None
    if entry.compute_advantages is not None:
        compute_advantages = _bind(entry.compute_advantages, section.advantage_args, f"advantage_args of {name!r}")
    elif section.advantage_args:
        raise ConfigError(f"advantage_args of {name!r}: it takes none, because it computes no advantages")
    loss_args = {**entry.loss_args, **section.loss_args}
    return Algorithm(
        name=name,
        compute_advantages=compute_advantages,
        compute_losses=_bind(entry.compute_losses, loss_args, f"loss_args of {name!r}"),
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


def _bind(function: Callable[..., Any], args: Mapping[str, Any], where: str) -> Callable[..., Any]:
    """Check the arguments against the function's keywords and their types, then bind them."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name, value in args.items():
        if name not in known:
            raise ConfigError(f"unknown argument {name!r} in {where}: {_name_nearest(name, known)}")
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{name}={value!r} in {where}: {error.errors()[0]['msg']}") from error
    return partial(function, **args)


def _name_nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known)}" if known else "it takes none"
