"""Signatures of workflows and judges."""

from __future__ import annotations

import functools
import inspect

import pytest

from tunesmith.errors import ConfigError
from tunesmith.rollout.signature import check_judge_function, check_workflow_function, list_parameters


async def full_workflow(task, model, auxiliary_models=None, logger=None): ...


async def judge(task, response): ...


async def with_options(x, task, model, *, style="plain", logger=None): ...


class Methods:
    async def workflow(self, task, model): ...

    async def workflow_with(self, x, task, model): ...

    async def __call__(self, task, response, logger): ...


class CallableWorkflow:
    async def __call__(self, task, model, x): ...


class TaskClass:
    def __init__(self, task, model): ...


async def judge_with(task, response, threshold): ...


def test_allowed_signatures_pass():
    check_workflow_function(full_workflow)
    check_workflow_function(Methods().workflow)
    check_workflow_function(functools.partial(full_workflow))
    check_judge_function(judge)
    check_judge_function(Methods())


@pytest.mark.parametrize("given", [CallableWorkflow, TaskClass, functools.partial(CallableWorkflow)])
@pytest.mark.parametrize("check", [check_workflow_function, check_judge_function, list_parameters])
def test_a_class_is_refused_with_what_to_write(given, check):
    name = getattr(given, "func", given).__name__
    with pytest.raises(ConfigError) as refused:
        check(given)
    message = str(refused.value)
    assert message.startswith(f"{name} is a class, but a workflow or judge is a function, `async def workflow(task, mo")
    assert message.endswith(f"name an object of the class, as `agent = {name}()` makes it")


def test_bound_parameters_do_not_count():
    bound = functools.partial(with_options, 1, style="short")
    for func in (
        bound,
        functools.partial(with_options, x=1, style="short"),
        functools.partial(functools.partial(with_options, x=1), style="short"),
        functools.partial(Methods().workflow_with, x=1),
        functools.partial(CallableWorkflow(), x=1),
    ):
        check_workflow_function(func)
        assert list_parameters(func) - {"logger"} == {"task", "model"}
    check_judge_function(functools.partial(judge_with, threshold=0.5))
    assert list_parameters(functools.partial(bound, logger=None)) == {"task", "model"}
    with pytest.raises(ValueError, match=r"Contains disallowed parameters: \['style'\]"):
        check_workflow_function(functools.partial(with_options, 1))
    with pytest.raises(ValueError, match=r"Missing essential parameters: \['model'\]"):
        check_workflow_function(functools.partial(full_workflow, model="m"))
    with pytest.raises(ValueError, match="not_async must be async"):
        check_workflow_function(functools.partial(not_async))


async def with_args(task, model, *rest): ...


async def with_kwargs(task, model, **rest): ...


async def with_nothing(): ...


async def with_more(task, model, temperature=1.0, seed=0): ...


def not_async(task, model): ...


async def yielding(task, model):
    yield


async def positional(task, model, /): ...


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (with_args, "*args parameter is not allowed: *rest"),
        (with_kwargs, "**kwargs parameter is not allowed: **rest"),
        (with_nothing, "Missing essential parameters: ['model', 'task']"),
        (judge, "Missing essential parameters: ['model']"),
        (with_more, "Contains disallowed parameters: ['seed', 'temperature']"),
        (Methods.workflow, "Contains disallowed parameters: ['self']"),
        (not_async, "the workflow function not_async must be async: define it with `async def`"),
        (yielding, "the workflow function yielding must be async: define it with `async def`"),
        (positional, "positional-only parameter is not allowed: task; arguments are passed by name"),
    ],
)
def test_other_signatures_are_refused_with_agentscopes_messages(func, message):
    with pytest.raises(ValueError) as caught:
        check_workflow_function(func)
    assert str(caught.value).startswith(message)


def test_a_wrong_signature_names_the_role_the_function_and_what_it_takes():
    with pytest.raises(ValueError) as caught:
        check_judge_function(with_more)
    line = inspect.getsourcelines(with_more)[1]
    assert str(caught.value).startswith("Missing essential parameters: ['response']. The judge (")
    assert str(caught.value).endswith(
        f"test_signature.py:{line} in with_more) takes task, response[, auxiliary_models][, logger]"
    )


def test_a_judge_needs_a_response():
    with pytest.raises(ValueError, match=r"Missing essential parameters: \['response'\]"):
        check_judge_function(full_workflow)
