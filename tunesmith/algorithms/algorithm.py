"""Resolves `AlgorithmSection` to an entry of the table with all arguments bound and checked; advantages of groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tunesmith.algorithms.advantages.baselines import keep_rewards
from tunesmith.algorithms.advantages.group import DEFAULT_K, Advantages, RunOutcome, compute_pass_at_k_advantages
from tunesmith.algorithms.own_functions import (
    CheckedAdvantages,
    build_random_scores,
    check_own_loss,
    replace_functions,
)
from tunesmith.algorithms.scores import Aggregation, Need, TokenInputs, TokenLosses, TokenScores, keep_advantages
from tunesmith.algorithms.table import ALGORITHMS, AlgorithmEntry
from tunesmith.arguments import bind_arguments, suggest_name
from tunesmith.config import AlgorithmSection, CorrectionSection
from tunesmith.errors import ConfigError
from tunesmith.types import Group, RunAdvantage, are_equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm with all its arguments bound."""

    section: AlgorithmSection
    entry: AlgorithmEntry
    """That of the table, with the user's functions in place of its own."""
    compute_advantages: Callable[[Sequence[Sequence[RunOutcome]]], Advantages] | None
    compute_terms: Callable[[TokenInputs], TokenInputs]
    compute_losses: Callable[[TokenScores], TokenLosses]
    aggregation: Aggregation
    kl_coef: float
    """Current weight of the KL in the loss; with `kl_adaptive` the trainer replaces it after each update."""
    needs: frozenset[Need]

    @property
    def name(self) -> str:
        return self.section.algorithm_type

    @property
    def is_supervised(self) -> bool:
        """Whether it trains on given completions: their tokens have no sampler logprobs and no advantages."""
        return self.compute_advantages is None

    @property
    def is_group_relative(self) -> bool:
        """Whether advantages are known to only compare the rollouts of a group; False for an own advantage function."""
        return self.entry.is_group_relative and not self.is_supervised

    @property
    def reads_tokens(self) -> bool:
        """Whether advantages may depend on tokens or logprobs of the rollouts; True for an own advantage function."""
        return self.entry.reads_tokens or self.section.advantage_args.get("rank_penalty", 0) > 0

    @property
    def keeps_advantages(self) -> bool:
        """Whether `compute_terms` keeps each token's advantage as it is."""
        return self.entry.compute_terms is keep_advantages

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether groups of zero advantage are trained: a KL, an entropy bonus or a regularizer has a gradient on them.
        A `std_threshold` above 0 always drops them."""
        section = self.section
        has_other_gradient = (
            section.kl_coef > 0
            or section.entropy_coef > 0
            or section.terms_args.get("reward_kl_coef", 0) > 0
            or section.loss_args.get("regularizer_coef", 0) > 0
        )
        drops_by_threshold = section.advantage_args.get("std_threshold", 0) > 0
        return self.entry.drops_equal_rewards and has_other_gradient and not drops_by_threshold

    @property
    def can_weigh_in_loss_pass(self) -> bool:
        """Whether importance weights depend on the token alone, and no logprobs are needed before the loss pass."""
        correction = self.section.correction
        return (
            self.keeps_advantages
            and correction.importance != "sequence"
            and correction.mask is None
            and "logprobs" not in self.needs
        )

    @property
    def has_own_inputs(self) -> bool:
        """Whether the inputs of a fresh token depend on it alone, but for the counts that the loss is divided by."""
        correction = self.section.correction
        return (
            self.keeps_advantages
            and correction.mask is None
            and correction.negative_sequence_delta is None
            and self.section.top_entropy_fraction == 1
        )

    def find_sequence_knob(self) -> str | None:
        """What combines the tokens of whole rollouts: the algorithm's terms, or the knob of a mean or a product."""
        correction, mask = self.section.correction, self.section.correction.mask
        combines = {
            repr(self.name): self.entry.needs_sequences,
            f"algorithm.loss_aggregation={self.aggregation}": self.aggregation == "seq-mean-token-mean",
            "algorithm.correction.importance=sequence": correction.importance == "sequence",
            f"algorithm.correction.mask.level={mask and mask.level}": mask is not None and mask.level != "token",
            f"algorithm.correction.negative_sequence_delta={correction.negative_sequence_delta}": (
                correction.negative_sequence_delta is not None
            ),
        }
        return next((knob for knob, is_combined in combines.items() if is_combined), None)

    def uses_importance_weights(self, *, has_older_tokens: bool) -> bool:
        """Whether a step multiplies losses by importance weights; `has_older_tokens`: older policies sampled some."""
        importance = self.section.correction.importance
        if importance == "auto":
            return self.entry.is_on_policy and not self.is_supervised and has_older_tokens
        return importance != "none"


def load_algorithm(section: AlgorithmSection, load: Callable[..., Any]) -> Algorithm:
    """The algorithm with the section's own functions, which `load(spec, knob=...)` imports."""
    named = {"algorithm.advantage": section.advantage, "algorithm.loss": section.loss}
    functions = {knob: load(spec, knob=knob) for knob, spec in named.items() if spec is not None}
    return resolve_algorithm(section, functions=functions)


def resolve_algorithm(section: AlgorithmSection, *, functions: Mapping[str, Callable[..., Any]] = {}) -> Algorithm:
    """Look up the algorithm and bind its arguments; an unknown name is a ConfigError with the nearest known name.

    `functions` are the loaded functions of the knobs `algorithm.advantage` and `algorithm.loss` that are set.
    """
    name = section.algorithm_type
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm_type {name!r}: {suggest_name(name, list(ALGORITHMS))}")
    entry = replace_functions(ALGORITHMS[name], section, functions)
    loss_args = {**entry.loss_args, **section.loss_args}
    compute_advantages = _bind_advantages(section, entry)
    compute_terms = bind_arguments(entry.compute_terms, section.terms_args, where=f"terms_args of {name!r}")
    compute_losses = bind_arguments(entry.compute_losses, loss_args, where=f"loss_args of {section.loss or name!r}")
    # of arguments whose types were checked
    needs = entry.needs | entry.find_needs({**section.advantage_args, **section.terms_args, **loss_args})
    if section.kl_coef > 0:
        needs |= {"reference"}
    if section.correction.negative_sequence_delta is not None:
        needs |= {"logprobs"}
    if section.top_entropy_fraction < 1:
        needs |= {"entropies"}
    algorithm = Algorithm(
        section=section,
        entry=entry,
        compute_advantages=compute_advantages,
        compute_terms=compute_terms,
        compute_losses=compute_losses,
        aggregation=section.loss_aggregation or entry.aggregation,
        kl_coef=section.kl_coef,
        needs=needs,
    )
    _check_section(algorithm)
    # on few values, which raises ConfigError for arguments that do not fit together before a run starts
    if compute_advantages is not None:
        compute_advantages([])
    scores = build_random_scores(compute_terms, needs)
    if section.loss is None:
        compute_losses(scores)
    else:
        check_own_loss(compute_losses, scores, knob=f"algorithm.loss={section.loss!r}", algorithm_type=name)
    return algorithm


def _bind_advantages(
    section: AlgorithmSection, entry: AlgorithmEntry
) -> Callable[[Sequence[Sequence[RunOutcome]]], Advantages] | None:
    name = section.algorithm_type
    if entry.compute_advantages is None:
        if section.advantage_args:
            raise ConfigError(f"advantage_args has no effect with {name!r}, which computes no advantages: leave it out")
        return None
    where = f"advantage_args of {section.advantage or name!r}"
    bound = bind_arguments(entry.compute_advantages, section.advantage_args, where=where)
    if section.advantage is None:
        return bound
    return CheckedAdvantages(bound, knob=f"algorithm.advantage={section.advantage!r}")


def _check_section(algorithm: Algorithm) -> None:
    """Refuse settings without effect, or with an effect that contradicts their name."""
    section, entry = algorithm.section, algorithm.entry
    if entry.aggregation == "sum" and section.loss_aggregation is not None:
        raise ConfigError(
            f"algorithm.loss_aggregation has no effect with {algorithm.name!r}, whose loss includes the token weights: "
            "leave it out"
        )
    if section.group_size == 1 and algorithm.is_group_relative and "experts" not in algorithm.needs:
        raise ConfigError(
            f"algorithm.group_size=1: {algorithm.name!r} compares rollouts of a task, so one rollout has no advantage; "
            "raise group_size, or choose an algorithm without a group baseline, such as reinforceplusplus"
        )
    if entry.compute_advantages is compute_pass_at_k_advantages:
        k = section.advantage_args.get("k", DEFAULT_K)
        if k >= section.group_size:
            raise ConfigError(
                f"advantage_args.k={k} of {algorithm.name!r} must be below algorithm.group_size={section.group_size}: "
                "the advantage compares different subsets of k rollouts"
            )
    if section.norm_length is not None and algorithm.aggregation != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"algorithm.norm_length={section.norm_length} has no effect on {algorithm.name!r} with loss_aggregation="
            f"{algorithm.aggregation}: leave it out, or set loss_aggregation=seq-mean-token-sum-norm"
        )
    if section.reference_refresh_steps is not None and "reference" not in algorithm.needs:
        raise ConfigError(
            f"algorithm.reference_refresh_steps={section.reference_refresh_steps} has no effect on {algorithm.name!r} "
            "without a KL: set kl_coef, or reward_kl_coef where the algorithm has it"
        )
    correction = section.correction
    is_corrected = correction.importance in ("token", "sequence") or correction.mask is not None
    if algorithm.is_supervised and (is_corrected or correction.negative_sequence_delta is not None):
        raise ConfigError(
            f"algorithm.correction has no effect with {algorithm.name!r}, which trains given completions: leave it out"
        )
    for bound in ("cap", "floor"):
        value, default = getattr(correction, bound), getattr(CorrectionSection(), bound)
        if value != default and not algorithm.uses_importance_weights(has_older_tokens=True):
            raise ConfigError(
                f"algorithm.correction.{bound}={value} has no effect on {algorithm.name!r} with "
                f"importance={correction.importance!r} (no importance weights): leave it out, or set importance=token"
            )
    if algorithm.is_supervised and section.top_entropy_fraction < 1:
        raise ConfigError(
            f"algorithm.top_entropy_fraction={section.top_entropy_fraction} has no effect with {algorithm.name!r}, "
            "which trains given completions: leave it out"
        )


def compute_group_advantages(
    algorithm: Algorithm, groups: Sequence[Group]
) -> tuple[list[list[RunAdvantage]], dict[str, float]]:
    """Advantages of every trajectory, and the numbers of trained, dropped and unscored groups.

    Groups of zero advantage are trained with advantage 0 if `algorithm.trains_zero_advantages`, else dropped.
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


def _compute_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> list[list[RunAdvantage]]:
    if algorithm.compute_advantages is None:
        raise ConfigError(f"algorithm_type={algorithm.name!r} does not train on rewards: choose grpo or another")
    outcomes = [
        [
            RunOutcome(
                reward=run.reward,
                num_turns=len(run.turns),
                turn_prompts=tuple(turn.prompt_ids for turn in run.turns),
                turn_logprobs=tuple(turn.logprobs for turn in run.turns),
                metrics=run.metrics,
                baseline_reward=group.baseline_reward,
            )
            for run in group.trajectories
        ]
        for group in groups
    ]
    return [list(row) for row in algorithm.compute_advantages(outcomes)]


def has_advantage(algorithm: Algorithm, group: Group) -> bool:
    """Whether a rollout has an advantage other than 0 and a turn that operators left in training, so that the group is
    trained for its rewards."""
    pairs = zip(group.trajectories, _compute_advantages(algorithm, [group])[0], strict=True)
    values = [value for run, value in pairs if value is not None and any(turn.is_trained for turn in run.turns)]
    if ALGORITHMS[algorithm.name].compute_advantages is keep_rewards:  # its terms compute advantages from any reward
        return bool(values)
    per_turn = [value if isinstance(value, tuple) else (value,) for value in values]
    return not are_equal([0.0, *chain.from_iterable(per_turn)])


def _keep_zero_advantages(
    algorithm: Algorithm, groups: Sequence[Group], advantages: list[list[RunAdvantage]]
) -> tuple[list[list[RunAdvantage]], int]:
    """Advantage 0 for the scored rollouts of groups without an advantage, and the number of these groups."""
    kept: list[list[RunAdvantage]] = []
    for group, row in zip(groups, advantages, strict=True):
        has_baseline = group.baseline_reward is not None or "baselines" not in algorithm.needs
        is_zero = has_baseline and bool(group.scored) and all(value is None for value in row)
        kept.append([None if run.reward is None else 0.0 for run in group.trajectories] if is_zero else row)
    num_kept = sum(old != new for old, new in zip(advantages, kept, strict=True))
    return kept, num_kept


def describe_algorithms() -> str:
    """The table as text: each algorithm's functions, their arguments and defaults, and its aggregation."""
    lines = []
    for name, entry in ALGORITHMS.items():
        lines.append(f"{name}  (aggregation {entry.aggregation})")
        if entry.compute_advantages is not None:
            lines.append(f"    advantage_args: {_describe_arguments(entry.compute_advantages, {})}")
        if entry.compute_terms is not keep_advantages:
            lines.append(f"    terms_args: {_describe_arguments(entry.compute_terms, {})}")
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
