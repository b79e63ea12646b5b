"""Checks of an own loss function on random tokens in float64, before a model loads.

The loss of a token must be finite, differentiable by its logprob, and a function of that token alone, so that the
gradient does not depend on how tokens are packed. The gradient is compared with finite differences in which detached
values are held fixed: `detach()` in a loss is allowed.

Axes: N random tokens, in sequences of equal length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tunesmith.algorithms.scores import Need, TokenInputs, TokenLosses, TokenScores
from tunesmith.errors import ConfigError
from tunesmith.user_lines import find_error_line

NUM_SEQUENCES = 6
SEQUENCE_LENGTH = 4
STEP = 1e-6
"""Step of the finite differences, in nats."""
GRADIENT_TOLERANCE = 1e-4
TOKEN_TOLERANCE = 1e-9
RESERVED_METRICS = frozenset(
    {
        "changed_ratio", "entropy", "epoch", "grad_norm", "kl", "kl_coef", "learning_rate", "loss", "m2po_masked_frac",
        "num_flat_tokens", "num_tokens", "num_trained_tokens", "num_updates", "pg_loss", "reward_kl",
    }
)  # fmt: skip
"""Names of metrics under `train/` that the trainer reports."""

LossFunction = Callable[[TokenScores], TokenLosses]


def check_own_loss(
    compute_losses: LossFunction,
    *,
    knob: str,
    algorithm_type: str,
    compute_terms: Callable[[TokenInputs], TokenInputs],
    needs: Set[Need],
) -> None:
    """Raise ConfigError, naming the knob, if the loss function breaks its contract."""
    scores = build_random_scores(compute_terms, needs)
    given = _copy(scores)
    compute = partial(_compute, compute_losses, knob=knob, algorithm_type=algorithm_type)
    losses_N = compute(scores)
    gradient_N = _take_gradient(losses_N, scores.logprobs_N, knob=knob)
    again_N = compute(scores)
    if not _is_unchanged(given, scores):
        raise ConfigError(f"{knob} changes its inputs in place: compute new tensors instead")
    if not torch.equal(again_N, losses_N):
        raise ConfigError(f"{knob} returns other losses for the same scores: it must be a function of its arguments")
    _check_tokens_alone(compute, scores, losses_N, gradient_N, knob=knob)
    _check_differences(compute_losses, scores, gradient_N, knob=knob)


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


class HeldDetached(TorchFunctionMode):
    """Records what `detach()`, `.data` and operations under `no_grad()` return; a later run gets the recorded values.

    So finite differences see a loss as autograd does, in which these values are constants.
    """

    def __init__(self, recorded: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.values: list[Tensor] = []
        self._recorded = recorded
        self._is_off = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            self._is_off = not args[0]
        is_detached = self._is_off or func in (torch.Tensor.detach, torch.detach) or func == torch.Tensor.data.__get__  # type: ignore[attr-defined]
        if not is_detached or not isinstance(result, Tensor):
            return result
        self.values.append(result)
        if self._recorded is None:
            return result
        return self._recorded[len(self.values) - 1]


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
    line = find_error_line(error)
    message = f"{knob} raised {type(error).__name__}: {error}" + ("" if line is None else f" ({line})")
    missing = [each.name for each in fields(TokenScores) if getattr(scores, each.name) is None]
    if "NoneType" in str(error) and missing:
        message += (
            f"; with algorithm_type={algorithm_type!r} these scores are None: {', '.join(missing)}. Choose an "
            "algorithm_type that computes them, as gspo does sequence_log_ratios_N"
        )
    return message


def _take_gradient(losses_N: Tensor, logprobs_N: Tensor, *, knob: str) -> Tensor:
    """The gradient of each token's loss by its logprob; raises if there is none, or if it is not finite."""
    weights_N = _draw_weights(len(losses_N))
    gradient_N = _differentiate(losses_N, logprobs_N, weights_N) / weights_N
    if not gradient_N.any():
        raise ConfigError(
            f"{knob}: the losses have no gradient by scores.logprobs_N: compute them from it, without detach(), "
            "item() or a copy by torch.tensor()"
        )
    if not gradient_N.isfinite().all():
        raise ConfigError(f"{knob}: the gradient by scores.logprobs_N is not finite: bound exp(), log() and divisions")
    return gradient_N


def _draw_weights(num_tokens: int) -> Tensor:
    """Unequal weights of the tokens, so that gradients between tokens do not cancel."""
    return torch.tensor(np.random.default_rng(1).uniform(0.5, 1.5, num_tokens))


def _differentiate(losses_N: Tensor, logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """The gradient of the weighted sum of the losses; zeros if they do not depend on the logprobs."""
    if not losses_N.requires_grad:
        return torch.zeros_like(weights_N)
    (gradient_N,) = torch.autograd.grad(torch.dot(weights_N, losses_N), logprobs_N, allow_unused=True)
    return torch.zeros_like(weights_N) if gradient_N is None else gradient_N


def _check_tokens_alone(
    compute: Callable[[TokenScores], Tensor],
    scores: TokenScores,
    losses_N: Tensor,
    gradient_N: Tensor,
    *,
    knob: str,
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


def _check_differences(compute_losses: LossFunction, scores: TokenScores, gradient_N: Tensor, *, knob: str) -> None:
    """Raise if a token's gradient is neither its left nor its right finite difference.

    Tokens do not mix, so all are moved at once; one of the two sides suffices at a kink such as a clip.
    """
    mode = HeldDetached()
    with mode:
        losses_N = compute_losses(scores).losses_N
    middle_N = losses_N.detach()

    def move(step: float) -> Tensor:
        moved = _with_gradient(replace(scores, logprobs_N=(scores.logprobs_N.detach() + step)))
        try:
            with HeldDetached(mode.values):
                losses_N = compute_losses(moved).losses_N
        except IndexError as error:
            raise ConfigError(f"{knob} computes with other operations when values change slightly") from error
        return losses_N.detach()

    right_N, left_N = (move(STEP) - middle_N) / STEP, (middle_N - move(-STEP)) / STEP
    limit_N = GRADIENT_TOLERANCE * (1 + gradient_N.abs())
    is_wrong_N = ((gradient_N - right_N).abs() > limit_N) & ((gradient_N - left_N).abs() > limit_N)
    if is_wrong_N.any():
        index = int(is_wrong_N.nonzero()[0])
        raise ConfigError(
            f"{knob}: autograd's gradient by scores.logprobs_N is {gradient_N[index].item():.6g} for a token, its "
            f"finite difference is {right_N[index].item():.6g}: check custom backward functions"
        )


def _map(scores: TokenScores, function: Callable[[Tensor], Tensor]) -> TokenScores:
    values = {each.name: getattr(scores, each.name) for each in fields(TokenScores)}
    mapped: dict[str, Any] = {name: None if value is None else function(value) for name, value in values.items()}
    return TokenScores(**mapped)


def _copy(scores: TokenScores) -> TokenScores:
    return _map(scores, lambda values_N: values_N.detach().clone())


def _with_gradient(scores: TokenScores) -> TokenScores:
    return replace(scores, logprobs_N=scores.logprobs_N.detach().requires_grad_())


def _is_unchanged(before: TokenScores, after: TokenScores) -> bool:
    pairs = [(getattr(before, each.name), getattr(after, each.name)) for each in fields(TokenScores)]
    return all(one is None or torch.equal(one, other.detach()) for one, other in pairs)
