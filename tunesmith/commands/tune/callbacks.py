"""Functions of the user that are called between steps, and the records that they receive.

A callback takes one record, is sync or async, and returns None or, except `on_checkpoint`, a `Stop`. It is called when
what the record describes is on disk. An exception in it ends the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.commands.eval.results import EvaluationResult
from tunesmith.config import CallbacksSection
from tunesmith.errors import CallbackError, ConfigError
from tunesmith.runs.load_function import CustomComponents, name_function
from tunesmith.types import Group, RunAdvantage
from tunesmith.user_lines import describe_raised


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by a callback to end the run after this step: it is evaluated and saved like the last step."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """What a callback receives."""

    step: int
    total_steps: int
    folder: Path
    """The run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd(RunEvent):
    """A finished training step."""

    metrics: Mapping[str, float]
    groups: tuple[Group, ...]
    """Every group of the step, before the operators, as in the rollout files."""
    advantages: tuple[tuple[RunAdvantage, ...], ...]
    """Of each trajectory of `groups`; None for trajectories that were not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnd(RunEvent):
    """An evaluation after `step`; before the first step it is 0."""

    metrics: Mapping[str, float]
    """As in metrics.jsonl: `eval/<set>/reward` and others."""
    results: Mapping[str, EvaluationResult]
    """By name of the held-out set, with every trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEnd(RunEvent):
    """A complete checkpoint."""

    path: Path
    """The folder of the checkpoint, which transformers can load. `keep_checkpoints` may remove it at a later one."""
    is_best: bool
    """Whether it has the best evaluation so far; False without `keep_best`."""
    is_last: bool


OnStepEnd = Callable[[StepEnd], Stop | None] | Callable[[StepEnd], Awaitable[Stop | None]]
OnEvaluation = Callable[[EvaluationEnd], Stop | None] | Callable[[EvaluationEnd], Awaitable[Stop | None]]
OnCheckpoint = Callable[[CheckpointEnd], None] | Callable[[CheckpointEnd], Awaitable[None]]


Callbacks = Mapping[str, Callable[[Any], Any]]
"""The callbacks of a run by name, as far as it has them."""


def load_callbacks(section: CallbacksSection, custom: CustomComponents) -> Callbacks:
    """The callbacks that were passed as objects or that the section names. Signatures are checked."""
    loaded: dict[str, Callable[[Any], Any]] = {}
    for name, spec in section:
        knob = f"callbacks.{name}"
        if (function := custom.load(spec, knob=knob)) is not None:
            check_callback(function, knob=knob)
            loaded[name] = function
    return loaded


def check_callback(function: Callable[..., Any], *, knob: str) -> None:
    """Raise unless the function can be called with one argument."""
    if not callable(function):
        raise ConfigError(f"{knob} must be a function, got {function!r}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{knob}={name_function(function)!r} must take one argument, the record: {error}") from error
    except ValueError:
        return  # built-in functions have no signature


async def call_callback(function: Callable[[Any], Any], record: RunEvent, *, name: str) -> Stop | None:
    """Call a callback and await it if it is async; an exception or another result is a CallbackError."""
    where = f"callback {name} ({name_function(function)}) at step {record.step}"
    try:
        result = function(record)
        if inspect.isawaitable(result):
            result = await result
    except Exception as error:
        raise CallbackError(describe_raised(where, error)) from error
    if result is None or (isinstance(result, Stop) and name != "on_checkpoint"):
        return result
    allowed = "None" if name == "on_checkpoint" else "None or Stop(reason)"
    raise CallbackError(f"{where} returned {result!r}: it must return {allowed}")
