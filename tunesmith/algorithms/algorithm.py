"""An algorithm as it is used: a line of the table with all its arguments bound and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome
from tunesmith.algorithms.aggregation import Aggregation
from tunesmith.algorithms.kl import KlEstimator
from tunesmith.algorithms.losses.clipped import TokenLosses, TokenScores
from tunesmith.algorithms.scores import BatchScores, Need, TokenTerms, keep_advantages
from tunesmith.algorithms.table import ALGORITHMS, COMPARISONS, ZERO_WITHOUT_DIFFERENCE
from tunesmith.arguments import bind_arguments, suggest_name
from tunesmith.config import AdaptiveKlSection, AlgorithmSection, CorrectionSection
from tunesmith.errors import ConfigError
from tunesmith.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm with all its arguments bound."""

    name: str
    compute_advantages: Callable[[Sequence[Sequence[RunOutcome]]], Advantages] | None
    compute_losses: Callable[[TokenScores], TokenLosses]
    aggregation: Aggregation
    kl_coef: float
    """Weight of the KL in the loss now; with `kl_adaptive` the trainer puts another in its place after each update."""
    kl_estimator: KlEstimator
    entropy_coef: float
    compute_terms: Callable[[BatchScores], TokenTerms]
    needs: frozenset[Need]
    kl_adaptive: AdaptiveKlSection | None
    correction: CorrectionSection
    is_on_policy: bool
    trains_zero_advantages: bool
    """Groups whose runs have no advantage train all the same: a KL, an entropy bonus or a regularizer has a gradient
    without one."""

    @property
    def is_supervised(self) -> bool:
        """It learns from given answers: tokens have no sampler's logprob and no advantage."""
        return self.compute_advantages is None

    def weighs_importance(self, *, has_older_tokens: bool) -> bool:
        """Whether a step multiplies losses by importance weights, given whether older policies sampled some of it."""
        if self.correction.importance == "auto":
            return self.is_on_policy and not self.is_supervised and has_older_tokens
        return self.correction.importance != "none"


def resolve_algorithm(section: AlgorithmSection) -> Algorithm:
    """Look the name up and bind the arguments; what is not known is a ConfigError that names the nearest known."""
    name = section.algorithm_type
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm_type {name!r}: {suggest_name(name, list(ALGORITHMS))}")
    entry = ALGORITHMS[name]
    compute_advantages = None
    if entry.compute_advantages is not None:
        compute_advantages = bind_arguments(
            entry.compute_advantages, section.advantage_args, where=f"advantage_args of {name!r}"
        )
    elif section.advantage_args:
        raise ConfigError(f"advantage_args of {name!r}: it takes none, because it computes no advantages")
    loss_args = {**entry.loss_args, **section.loss_args}
    terms_args = {**entry.terms_args, **section.terms_args}
    needs = entry.needs | entry.find_needs({**section.advantage_args, **terms_args, **loss_args})
    if section.kl_coef > 0:
        needs |= {"reference"}
    if section.correction.negative_sequence_delta is not None:
        needs |= {"logprobs"}
    algorithm = Algorithm(
        name=name,
        compute_advantages=compute_advantages,
        compute_losses=bind_arguments(entry.compute_losses, loss_args, where=f"loss_args of {name!r}"),
        compute_terms=bind_arguments(entry.compute_terms, terms_args, where=f"terms_args of {name!r}"),
        needs=needs,
        aggregation=section.loss_aggregation or entry.aggregation,
        kl_coef=section.kl_coef,
        kl_estimator=section.kl_estimator,
        kl_adaptive=section.kl_adaptive,
        entropy_coef=section.entropy_coef,
        correction=section.correction,
        is_on_policy=entry.is_on_policy,
        trains_zero_advantages=_trains_zero_advantages(section),
    )
    _check_section(section, algorithm)
    _check_arguments(algorithm)
    return algorithm


def _trains_zero_advantages(section: AlgorithmSection) -> bool:
    """A threshold of the deviation is a wish to leave groups out, whatever else they would be trained by."""
    has_other_gradient = (
        section.kl_coef > 0
        or section.entropy_coef > 0
        or section.terms_args.get("reward_kl_coef", 0) > 0
        or section.loss_args.get("regularizer_coef", 0) > 0
    )
    drops_by_wish = section.advantage_args.get("std_threshold", 0) > 0
    is_zero = ALGORITHMS[section.algorithm_type].compute_advantages in ZERO_WITHOUT_DIFFERENCE
    return is_zero and has_other_gradient and not drops_by_wish


def _check_arguments(algorithm: Algorithm) -> None:
    """Call the functions on nothing, so that arguments that do not go together are refused before anything runs."""
    if algorithm.compute_advantages is not None:
        algorithm.compute_advantages([])
    nothing = torch.zeros(0)
    algorithm.compute_losses(
        TokenScores(
            logprobs_N=nothing,
            old_logprobs_N=nothing,
            advantages_N=nothing,
            sequence_log_ratios_N=nothing,
            constants_N=nothing,
        )
    )


def _check_section(section: AlgorithmSection, algorithm: Algorithm) -> None:
    """Refuse what would have no effect, or another effect than it seems."""
    if ALGORITHMS[algorithm.name].aggregation == "sum" and section.loss_aggregation is not None:
        raise ConfigError(f"algorithm.loss_aggregation: {algorithm.name!r} weighs its tokens itself; leave it out")
    is_comparison = ALGORITHMS[algorithm.name].compute_advantages in COMPARISONS
    if section.group_size == 1 and is_comparison and "experts" not in algorithm.needs:
        raise ConfigError(
            f"algorithm.group_size=1: {algorithm.name!r} compares the runs of a task and learns nothing from one; "
            "raise group_size, or choose an algorithm that needs no comparison, such as reinforceplusplus"
        )
    if section.norm_length is not None and algorithm.aggregation != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"algorithm.norm_length={section.norm_length} has no effect on {algorithm.name!r} with loss_aggregation="
            f"{algorithm.aggregation}: leave it out, or set loss_aggregation=seq-mean-token-sum-norm"
        )
    if section.kl_coef == 0 and section.kl_estimator != AlgorithmSection().kl_estimator:
        raise ConfigError(f"algorithm.kl_estimator={section.kl_estimator!r} has no effect with kl_coef=0: set kl_coef")
    if section.kl_adaptive is not None and section.kl_coef == 0:
        raise ConfigError("algorithm.kl_adaptive has no effect with kl_coef=0: set kl_coef to where it shall begin")
    correction = section.correction
    is_corrected = correction.importance in ("token", "sequence") or correction.mask is not None
    if algorithm.is_supervised and (is_corrected or correction.negative_sequence_delta is not None):
        raise ConfigError(
            f"algorithm.correction: {algorithm.name!r} learns from given answers, which no policy sampled"
        )
    if correction.cap != CorrectionSection().cap and not algorithm.weighs_importance(has_older_tokens=True):
        raise ConfigError(
            f"algorithm.correction.cap={correction.cap} has no effect on {algorithm.name!r} with "
            f"importance={correction.importance!r}, which truncates no weights: leave it out, or set importance=token"
        )


def compute_group_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> tuple[Advantages, dict[str, float]]:
    """Advantages of every trajectory, and how many groups train, were dropped, or had no score at all.

    Groups without an advantage get 0 and train where the algorithm trains these, and are dropped elsewhere.
    """
    advantages, zero_metrics = _compute_advantages(algorithm, groups), {}
    if algorithm.trains_zero_advantages:
        advantages, num_zero = _keep_zero_advantages(algorithm, groups, advantages)
        zero_metrics = {"algorithm/num_zero_advantage_groups": float(num_zero)}
    is_trained = [any(value is not None for value in row) for row in advantages]
    num_unscored = sum(not group.scored for group in groups)
    metrics = {
        "algorithm/num_trained_groups": float(sum(is_trained)),
        "algorithm/num_dropped_groups": float(len(groups) - sum(is_trained) - num_unscored),
        "algorithm/num_unscored_groups": float(num_unscored),
    }
    return advantages, metrics | zero_metrics


def _compute_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> Advantages:
    if algorithm.compute_advantages is None:
        raise ConfigError(f"algorithm_type={algorithm.name!r} does not learn from rewards; choose grpo or another")
    outcomes = [
        [
            RunOutcome(
                reward=run.reward,
                num_steps=len(run.turns),
                turn_prompts=tuple(turn.prompt_ids for turn in run.turns),
                turn_logprobs=tuple(turn.logprobs for turn in run.turns),
                metrics=run.metrics,
                baseline_reward=group.baseline_reward,
            )
            for run in group.trajectories
        ]
        for group in groups
    ]
    return algorithm.compute_advantages(outcomes)


def has_advantage(algorithm: Algorithm, group: Group) -> bool:
    """Whether the group's rewards teach anything."""
    return any(value is not None for value in _compute_advantages(algorithm, [group])[0])


def _keep_zero_advantages(
    algorithm: Algorithm, groups: Sequence[Group], advantages: Advantages
) -> tuple[Advantages, int]:
    """0 for the scored runs of groups that were dropped for want of a difference, and how many groups these are."""
    kept: Advantages = []
    for group, row in zip(groups, advantages, strict=True):
        has_baseline = group.baseline_reward is not None or "baselines" not in algorithm.needs
        is_zero = has_baseline and bool(group.scored) and all(value is None for value in row)
        kept.append([None if run.reward is None else 0.0 for run in group.trajectories] if is_zero else list(row))
    num_kept = sum(old != new for old, new in zip(map(list, advantages), kept, strict=True))
    return kept, num_kept


def describe_algorithms() -> str:
    """The table as text: each algorithm's functions, their arguments and defaults, and its aggregation."""
    lines = []
    for name, entry in ALGORITHMS.items():
        lines.append(f"{name}  (aggregation {entry.aggregation})")
        if entry.compute_advantages is not None:
            lines.append(f"    advantage_args: {_describe_arguments(entry.compute_advantages, {})}")
        if entry.compute_terms is not keep_advantages:
            lines.append(f"    terms_args: {_describe_arguments(entry.compute_terms, entry.terms_args)}")
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
