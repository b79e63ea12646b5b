"""Advantage and loss functions of users: their place in the table's entry, their signatures, and their checks.

An own function replaces that of `algorithm_type`; the entry's other parts stay.

An own loss is computed on random tokens in float64 before a model loads. The loss of a token must be finite,
differentiable by its logprob, and a function of that token alone, so that the gradient does not depend on how tokens
are packed.

Axes: N random tokens, in sequences of equal length.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import partial
from numbers import Real
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome, spread_scored
from tunesmith.algorithms.scores import Need, TokenInputs, TokenLosses, TokenScores
from tunesmith.algorithms.table import AlgorithmEntry
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError
from tunesmith.types import RunAdvantage
from tunesmith.user_lines import describe_raised

NUM_SEQUENCES = 6
SEQUENCE_LENGTH = 4
TOKEN_TOLERANCE = 1e-9
RESERVED_METRICS = frozenset(
    {
        "changed_ratio", "clip_cov_frac", "entropy", "entropy_masked_frac", "entropy_selected_frac",
        "entropy_threshold", "epoch", "grad_norm", "kl", "kl_coef", "learning_rate", "loss", "m2po_masked_frac",
        "num_flat_tokens", "num_tokens", "num_trained_tokens", "num_updates", "pg_loss", "reference_step",
        "relative_update", "reward_kl", "token_covariance", "vespo_weight",
    }
)  # fmt: skip
"""Names of metrics under `train/` that the trainer reports."""

LossFunction = Callable[[TokenScores], TokenLosses]


def check_own_loss(compute_losses: LossFunction, scores: TokenScores, *, knob: str, algorithm_type: str) -> None:
    """Raise ConfigError, naming the knob, if the loss function breaks its contract on random scores."""
    given = _map(scores, lambda values_N: values_N.detach().clone())
    compute = partial(_compute, compute_losses, knob=knob, algorithm_type=algorithm_type)
    losses_N = compute(scores)
    gradient_N = _take_gradient(losses_N, scores.logprobs_N, knob=knob)
    again_N = compute(scores)
    if not _is_unchanged(given, scores):
        raise ConfigError(f"{knob} changes its inputs in place: compute new tensors instead")
    if not torch.equal(again_N, losses_N):
        raise ConfigError(f"{knob} returns other losses for the same scores: it must be a function of its arguments")
    _check_tokens_alone(compute, scores, losses_N, gradient_N, knob=knob)


def build_random_scores(compute_terms: Callable[[TokenInputs], TokenInputs], needs: Set[Need]) -> TokenScores:
    """Random scores in float64, with the optional inputs that the terms of the algorithm compute."""
    rng, num_tokens = np.random.default_rng(0), NUM_SEQUENCES * SEQUENCE_LENGTH
    sequence_E = np.repeat(np.arange(NUM_SEQUENCES), SEQUENCE_LENGTH)
    logprobs_E = -rng.uniform(0.05, 4.0, num_tokens)
    scored: dict[str, Any] = {
        f"{name}_E": -rng.uniform(0.05, 4.0, num_tokens)
        for name in ("entropies", "reference_logprobs", "teacher_logprobs", "values")
    }
    tokens = TokenInputs(
        old_logprobs_E=logprobs_E + rng.normal(0.0, 0.4, num_tokens),
        advantages_E=np.repeat(rng.normal(0.0, 1.0, NUM_SEQUENCES), SEQUENCE_LENGTH),
        sequence_E=sequence_E,
        group_E=sequence_E // 2,
        is_expert_E=sequence_E == NUM_SEQUENCES - 1 if "experts" in needs else None,
        logprobs_E=logprobs_E if "logprobs" in needs else None,
        **scored,
    )
    columns = compute_terms(tokens).list_columns() | {"logprobs_E": logprobs_E}
    names = [each.name for each in fields(TokenScores)]
    tensors: dict[str, Any] = {
        name: torch.tensor(columns[column], dtype=torch.float64)
        for name in names
        if (column := name.removesuffix("_N") + "_E") in columns
    }
    return _with_gradient(TokenScores(**tensors))


def _compute(compute_losses: LossFunction, scores: TokenScores, *, knob: str, algorithm_type: str) -> Tensor:
    """The losses of the function, after the checks of their type, shape and values."""
    try:
        result = compute_losses(scores)
    except Exception as error:
        raise ConfigError(_describe_raised(error, scores, knob=knob, algorithm_type=algorithm_type)) from error
    if not isinstance(result, TokenLosses):
        raise ConfigError(f"{knob} must return TokenLosses(losses_N=..., metrics=...), got {type(result).__name__}")
    _check_tensor(result.losses_N, scores.logprobs_N, f"{knob}: losses_N")
    if result.losses_N.dtype != scores.logprobs_N.dtype:
        raise ConfigError(
            f"{knob}: losses_N must have the dtype of logprobs_N, {scores.logprobs_N.dtype} here, got "
            f"{result.losses_N.dtype}"
        )
    for name, values_N in result.metrics.items():
        if not isinstance(name, str) or name in RESERVED_METRICS:
            raise ConfigError(f"{knob}: the metric {name!r} is reported by the trainer: choose another name")
        _check_tensor(values_N, scores.logprobs_N, f"{knob}: metric {name!r}")
        if values_N.requires_grad:
            raise ConfigError(f"{knob}: metric {name!r} has a gradient: detach() it")
    return result.losses_N


def _check_tensor(found: Any, like: Tensor, name: str) -> None:
    if not isinstance(found, Tensor):
        raise ConfigError(f"{name} must be a tensor, got {type(found).__name__}")
    if found.shape != like.shape:
        raise ConfigError(
            f"{name} must have one value per token, shape {list(like.shape)} like logprobs_N, got {list(found.shape)}"
        )
    if not found.isfinite().all():
        raise ConfigError(f"{name} is not finite for log-ratios below {like.abs().max():.1f}: bound exp() and log()")


def _describe_raised(error: Exception, scores: TokenScores, *, knob: str, algorithm_type: str) -> str:
    message = describe_raised(knob, error)
    missing = [each.name for each in fields(TokenScores) if getattr(scores, each.name) is None]
    if "NoneType" in str(error) and missing:
        message += (
            f"; with algorithm_type={algorithm_type!r} these scores are None: {', '.join(missing)}. Choose an "
            "algorithm_type that computes them, as gspo does sequence_log_ratios_N"
        )
    return message


def _take_gradient(losses_N: Tensor, logprobs_N: Tensor, *, knob: str) -> Tensor:
    """The gradient of each token's loss by its logprob; raises if there is none, or if it is not finite."""
    # unequal weights, so that gradients between tokens do not cancel
    weights_N = torch.tensor(np.random.default_rng(1).uniform(0.5, 1.5, len(losses_N)))
    gradient_N = _differentiate(losses_N, logprobs_N, weights_N) / weights_N
    if not gradient_N.any():
        raise ConfigError(
            f"{knob}: the losses have no gradient by scores.logprobs_N: compute them from it, without detach(), "
            "item() or a copy by torch.tensor()"
        )
    if not gradient_N.isfinite().all():
        raise ConfigError(f"{knob}: the gradient by scores.logprobs_N is not finite: bound exp(), log() and divisions")
    return gradient_N


def _differentiate(losses_N: Tensor, logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """The gradient of the weighted sum of the losses; zeros if they do not depend on the logprobs."""
    if not losses_N.requires_grad:
        return torch.zeros_like(weights_N)
    (gradient_N,) = torch.autograd.grad(torch.dot(weights_N, losses_N), logprobs_N, allow_unused=True)
    return torch.zeros_like(weights_N) if gradient_N is None else gradient_N


def _check_tokens_alone(
    compute: Callable[[TokenScores], Tensor], scores: TokenScores, losses_N: Tensor, gradient_N: Tensor, *, knob: str
) -> None:
    """Raise if loss or gradient of a token differ when the token is the only one."""
    for index in range(len(losses_N)):
        single = _with_gradient(_map(scores, itemgetter(slice(index, index + 1))))
        loss_1 = compute(single)
        gradient_1 = _differentiate(loss_1, single.logprobs_N, torch.ones_like(loss_1))
        for name, whole_N, alone_1 in (("loss", losses_N, loss_1), ("gradient", gradient_N, gradient_1)):
            whole, alone = whole_N[index].item(), alone_1.item()
            if not math.isclose(whole, alone, rel_tol=TOKEN_TOLERANCE, abs_tol=TOKEN_TOLERANCE):
                raise ConfigError(
                    f"{knob}: the {name} of a token depends on the other tokens ({whole:.6g} among "
                    f"{len(losses_N)} tokens, {alone:.6g} alone), so it would depend on how tokens are packed: leave "
                    "means over tokens to algorithm.loss_aggregation, and put statistics in an advantage function"
                )


def _map(scores: TokenScores, function: Callable[[Tensor], Tensor]) -> TokenScores:
    values = {each.name: getattr(scores, each.name) for each in fields(TokenScores)}
    mapped: dict[str, Any] = {name: None if value is None else function(value) for name, value in values.items()}
    return TokenScores(**mapped)


def _with_gradient(scores: TokenScores) -> TokenScores:
    return replace(scores, logprobs_N=scores.logprobs_N.detach().requires_grad_())


def _is_unchanged(before: TokenScores, after: TokenScores) -> bool:
    pairs = [(getattr(before, each.name), getattr(after, each.name)) for each in fields(TokenScores)]
    return all(one is None or torch.equal(one, other.detach()) for one, other in pairs)


RELATIVE_TOLERANCE = 1e-6
"""Largest relative difference of two results that may differ only by the order of summation."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Outcomes = Sequence[Sequence[RunOutcome]]


def replace_functions(
    entry: AlgorithmEntry, section: AlgorithmSection, functions: Mapping[str, Callable[..., Any]]
) -> AlgorithmEntry:
    """The table's entry with the user's functions, by their knobs, in place of its own."""
    for name, parameter in (("advantage", "groups"), ("loss", "scores")):
        if (spec := getattr(section, name)) is None:
            continue
        knob = f"algorithm.{name}"
        if entry.compute_advantages is None:
            raise ConfigError(
                f"{knob}={spec!r} has no effect with algorithm_type={section.algorithm_type!r}, which trains given "
                "completions: choose an algorithm that trains on rewards"
            )
        check_signature(functions[knob], parameter, knob=f"{knob}={spec!r}")
    if section.advantage is not None:
        entry = replace(
            entry,
            compute_advantages=functions["algorithm.advantage"],
            is_group_relative=False,
            drops_equal_rewards=False,
            reads_tokens=True,
        )
    if section.loss is not None:
        entry = replace(entry, compute_losses=functions["algorithm.loss"], loss_args={})
    return entry


def check_signature(function: Callable[..., Any], parameter: str, *, knob: str) -> None:
    """Raise unless the function takes one positional argument, and its own arguments by keyword only."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{knob} is not a function of Python code: {error}") from error
    kinds = [each.kind for each in signature.parameters.values()]
    num_positional = sum(kind in POSITIONAL for kind in kinds)
    is_variadic = inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds
    if num_positional != 1 or is_variadic:
        raise ConfigError(
            f"{knob} must take one positional argument and its own arguments by keyword only, as in "
            f"f({parameter}, *, clip=0.2); its signature is {signature}"
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{knob} must be an ordinary function, not `async def`")


class CheckedAdvantages:
    """Calls an own advantage function and checks what it returns.

    The function receives the scored rollouts only: failed ones, and groups without a scored rollout, get None. Shape
    and finite values are checked in every call; that the function changes no input, repeats its result and does not
    depend on the order of groups and rollouts, in the first call and in the first one with several groups.
    """

    def __init__(self, function: Callable[[Outcomes], Any], *, knob: str) -> None:
        self._function = function
        self._knob = knob
        self._num_checked = 0

    def __call__(self, groups: Outcomes) -> Advantages:
        scored = [[run for run in group if run.reward is not None] for group in groups]
        given = [group for group in scored if group]
        is_due = min(len(given), 2) > self._num_checked
        copies = [[replace(run, metrics=dict(run.metrics)) for run in group] for group in given] if is_due else []
        found = self._compute(given) if given else []
        if is_due:
            if given != copies:
                raise self._error("changed its argument: compute new values instead")
            self._check_invariance(given, found)
            self._num_checked = min(len(given), 2)
        rows = iter(found)
        return [spread_scored(group, next(rows) if kept else []) for group, kept in zip(groups, scored, strict=True)]

    def _compute(self, groups: Outcomes) -> Advantages:
        try:
            result = self._function([list(group) for group in groups])
        except Exception as error:
            raise ConfigError(describe_raised(self._knob, error)) from error
        if not _is_list(result) or len(result) != len(groups):
            raise self._error(f"must return one list per group, {len(groups)} in all, got {_describe(result)}")
        return [self._read_row(row, group) for row, group in zip(result, groups, strict=True)]

    def _read_row(self, row: Any, group: Sequence[RunOutcome]) -> list[RunAdvantage]:
        if not _is_list(row) or len(row) != len(group):
            raise self._error(f"must return one value per rollout, {len(group)} for this group, got {_describe(row)}")
        return [self._read_value(value, run) for value, run in zip(row, group, strict=True)]

    def _read_value(self, value: Any, run: RunOutcome) -> RunAdvantage:
        if value is None:
            return None
        if isinstance(value, tuple):
            if len(value) != run.num_turns:
                raise self._error(
                    f"returned {len(value)} advantages for a rollout of {run.num_turns} model calls: return one "
                    "number, or a tuple of one number per model call"
                )
            return tuple(self._read_number(each) for each in value)
        return self._read_number(value)

    def _read_number(self, value: Any) -> float:
        if not isinstance(value, Real):
            raise self._error(f"must return numbers, tuples of numbers or None, got {_describe(value)}")
        if not math.isfinite(value):
            raise self._error(f"returned {value}: advantages must be finite; None excludes a rollout from training")
        return float(value)

    def _check_invariance(self, groups: Outcomes, found: Advantages) -> None:
        if not _is_close(self._compute(groups), found):
            raise self._error("returned other values for the same groups: it must be a function of its arguments alone")
        if not _is_close(self._compute(groups[::-1])[::-1], found):
            raise self._error("depends on the order of the groups, which has no meaning")
        rotated = self._compute([[*group[1:], *group[:1]] for group in groups])
        if not _is_close([[*row[-1:], *row[:-1]] for row in rotated], found):
            raise self._error("depends on the order of the rollouts within a group, which has no meaning")

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._knob} {message}")


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__iter__") and not isinstance(value, str | dict)


def _describe(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of length {len(value)}" if _is_list(value) else f"{value!r}" if value is None else kind


def _is_close(one: Any, other: Any) -> bool:
    """Whether nested values are equal up to rounding."""
    if one is None or other is None:
        return one is other
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(_is_close, one, other))
    return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)
