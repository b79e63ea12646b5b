"""Checks the signatures of workflow and judge before any model is loaded.

Parameter names, the order of the checks and the starts of their messages follow AgentScope. The check for `async def`
is additional; a workflow may also be a plain function, which runs in a thread. Parameters bound by a
`functools.partial` do not count.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.user_lines import find_definition_line

AUXILIARY_MODELS = "auxiliary_models"
"""A parameter of workflows and judges that receives the other models of the run."""
OPTIONAL_PARAMETERS = frozenset({AUXILIARY_MODELS, "logger"})
ENVIRONMENT = "environment"
"""A parameter of workflows that the pipeline binds to the run's environment."""
WORKFLOW_PARAMETERS = frozenset({"task", "model"})
PROMPT_WORKFLOW_PARAMETERS = frozenset({"task", "system_prompt"})
JUDGE_PARAMETERS = frozenset({"task", "response"})
ORDER = ("task", "_task", "model", "system_prompt", "response")
"""In which parameters are listed."""


def check_workflow_function(func: Callable[..., Any], *, allows_sync: bool = False) -> None:
    """Raise a ValueError unless `func` is `async f(task, model[, auxiliary_models][, logger][, environment])`.

    `allows_sync`: a plain function with these parameters passes too.
    """
    _check_parameters(func, "workflow", WORKFLOW_PARAMETERS, OPTIONAL_PARAMETERS | {ENVIRONMENT})
    if not (allows_sync and is_sync_function(func)):
        _check_async(func, "workflow")


def check_judge_function(func: Callable[..., Any]) -> None:
    """Raise a ValueError unless `func` is `async f(task, response[, auxiliary_models][, logger])`."""
    _check_parameters(func, "judge", JUDGE_PARAMETERS, OPTIONAL_PARAMETERS)
    _check_async(func, "judge")


def check_prompt_workflow_function(func: Callable[..., Any]) -> None:
    """Raise a ValueError unless `func` is `f(task, system_prompt[, model][, auxiliary_models][, logger])`, async or
    not."""
    _check_parameters(func, "workflow", PROMPT_WORKFLOW_PARAMETERS, OPTIONAL_PARAMETERS | {"model"})
    if not is_sync_function(func):
        _check_async(func, "workflow")


def check_selection_judge_function(func: Callable[..., Any]) -> None:
    """As `check_judge_function`; the task may be called `_task`, as in AgentScope's built-in judges."""
    if "_task" not in _find_open_parameters(func):
        check_judge_function(func)
        return
    _check_parameters(func, "judge", frozenset({"_task", "response"}), frozenset())
    _check_async(func, "judge")


def check_workflow_branches(func: Callable[..., Any]) -> None:
    """Raise a ConfigError if rollouts of a checked workflow cannot branch.

    A workflow says why it cannot be run again with the same results in its attribute `cannot_branch`, and so does the
    environment that it is bound to.
    """
    bound = getattr(func, "keywords", {}).get(ENVIRONMENT)
    parts = (func, find_innermost(func), bound)
    reason = next(filter(None, (getattr(each, "cannot_branch", None) for each in parts)), None)
    if reason is None and AUXILIARY_MODELS in list_parameters(func):
        reason = "it takes auxiliary_models, whose replies a branch cannot receive from its parent"
    if reason is not None:
        raise ConfigError(f"rollout.branching: the workflow {_find_name(func)} cannot branch: {reason}")


def list_parameters(func: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters that a checked function takes."""
    return frozenset(_find_open_parameters(func))


def is_sync_function(func: Callable[..., Any]) -> bool:
    """Whether a call returns the result itself: no coroutine and no generator."""
    inner = find_innermost(func)
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return not any(is_kind(each) for is_kind in kinds for each in (inner, type(inner).__call__))


def _find_open_parameters(func: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters not bound by a partial, by name."""
    if not callable(func):
        raise ConfigError(f"{func!r} is no function; its name belongs into the config, as workflow or judge")
    if inspect.isclass(inner := find_innermost(func)):
        raise ConfigError(
            f"{inner.__name__} is a class, but a workflow or judge is a function, `async def workflow(task, model)` or "
            "`async def judge(task, response)`, or an object with such a `__call__`: name an object of the class, as "
            f"`agent = {inner.__name__}()` makes it"
        )
    bound: set[str] = set()
    outer = func
    while isinstance(outer, functools.partial):
        bound |= outer.keywords.keys()
        outer = outer.func
    parameters = inspect.signature(func).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in bound}


def find_innermost(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside nested partials."""
    while isinstance(func, functools.partial):
        func = func.func
    return func


def _check_parameters(func: Callable[..., Any], role: str, essential: frozenset[str], optional: frozenset[str]) -> None:
    try:
        _check_names(_find_open_parameters(func), essential, optional)
    except ValueError as error:
        if inspect.isclass(find_innermost(func)):
            raise  # what a workflow and a judge take is said
        place = find_definition_line(find_innermost(func)) or _find_name(func)
        takes = ", ".join(sorted(essential, key=ORDER.index)) + "".join(f"[, {name}]" for name in sorted(optional))
        raise ValueError(f"{error}. The {role} ({place}) takes {takes}") from None


def _check_names(
    parameters: Mapping[str, inspect.Parameter], essential: frozenset[str], optional: frozenset[str]
) -> None:
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(f"*args parameter is not allowed: *{name}")
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            raise ValueError(f"**kwargs parameter is not allowed: **{name}")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ValueError(f"positional-only parameter is not allowed: {name}; arguments are passed by name")
    missing = sorted(essential - parameters.keys())
    if missing:
        raise ValueError(f"Missing essential parameters: {missing}")
    disallowed = sorted(parameters.keys() - essential - optional)
    if disallowed:
        raise ValueError(f"Contains disallowed parameters: {disallowed}")


def _find_name(func: Callable[..., Any]) -> str:
    inner = find_innermost(func)
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def _check_async(func: Callable[..., Any], role: str) -> None:
    inner = find_innermost(func)
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    if not is_async:
        raise ValueError(f"the {role} function {_find_name(func)} must be async: define it with `async def`")
