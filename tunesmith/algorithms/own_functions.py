"""Advantage and loss functions of users: their place in the table's entry, their signatures, and checked advantages.

An own function replaces that of `algorithm_type`; the entry's other parts stay. The checks of own losses are in
`loss_contract.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome, spread_scored
from tunesmith.algorithms.table import AlgorithmEntry
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError
from tunesmith.types import RunAdvantage
from tunesmith.user_lines import find_error_line

RELATIVE_TOLERANCE = 1e-6
"""Largest relative difference of two results that may differ only by the order of summation."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Outcomes = Sequence[Sequence[RunOutcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFunctions:
    """Loaded functions of `algorithm.advantage` and `algorithm.loss`; None keeps the function of `algorithm_type`."""

    advantage: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None


def replace_functions(entry: AlgorithmEntry, section: AlgorithmSection, own: OwnFunctions) -> AlgorithmEntry:
    """The table's entry with the user's functions in place of its own."""
    for knob, spec, function in list_functions(section, own):
        if entry.compute_advantages is None:
            raise ConfigError(
                f"{knob}={spec!r} has no effect with algorithm_type={section.algorithm_type!r}, which trains given "
                "completions: choose an algorithm that trains on rewards"
            )
        if function is None:
            raise ConfigError(f"{knob}={spec!r} was not loaded: pass the function as {knob.split('.')[1]}_func")
    if own.advantage is not None:
        check_signature(own.advantage, "groups", knob=f"algorithm.advantage={section.advantage!r}")
        entry = replace(
            entry,
            compute_advantages=own.advantage,
            is_group_relative=False,
            drops_equal_rewards=False,
            reads_tokens=True,
        )
    if own.loss is not None:
        check_signature(own.loss, "scores", knob=f"algorithm.loss={section.loss!r}")
        entry = replace(entry, compute_losses=own.loss, loss_args={})
    return entry


def list_functions(
    section: AlgorithmSection, own: OwnFunctions = OwnFunctions()
) -> list[tuple[str, str, Callable[..., Any] | None]]:
    """Knob, value and function of each knob of an own function that is set."""
    named = (
        ("algorithm.advantage", section.advantage, own.advantage),
        ("algorithm.loss", section.loss, own.loss),
    )
    return [(knob, spec, function) for knob, spec, function in named if spec is not None]


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
            line = find_error_line(error)
            where = "" if line is None else f" ({line})"
            raise ConfigError(f"{self._knob} raised {type(error).__name__}: {error}{where}") from error
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
