"""Time and tokens of one run of a workflow.

Of a model in this process, the recorded turns are counted. Of other chat models, the calls of the model object: its
class is replaced by a subclass while it is measured, so that the object stays the caller's. Replies of AgentScope
(`input_tokens`, `output_tokens`) and of OpenAI's client (`prompt_tokens`, `completion_tokens`) state their usage.
Tokens are unknown, not 0, if a reply states none or if the workflow calls the model in another way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tunesmith.rollout.recording.recorder import Session
from tunesmith.rollout.service import BoundModel, ModelProvider
from tunesmith.types import Sampling, Turn

FIELDS = (("input_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens"))


@dataclass(slots=True, kw_only=True)
class RolloutUsage:
    """What one run of a workflow used."""

    session: Session | None
    """The recorded calls, if the model is in this process."""
    num_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    is_complete: bool = True
    """Whether every call stated its usage."""

    def add(self, usage: Any) -> None:
        """Add the usage that a reply states; None: it states none."""
        self.num_calls += 1
        for input_name, output_name in FIELDS:
            given = read_field(usage, input_name), read_field(usage, output_name)
            if all(isinstance(each, int) for each in given):
                self.input_tokens += given[0]
                self.output_tokens += given[1]
                return
        self.is_complete = False

    def count_tokens(self) -> tuple[int, int] | None:
        """Input and output tokens; None if they are unknown."""
        if self.session is not None:
            return self.session.count_tokens()
        return (self.input_tokens, self.output_tokens) if self.num_calls and self.is_complete else None


def read_field(holder: Any, name: str) -> Any:
    """An attribute, or None; objects of AgentScope raise KeyError for one that they do not have."""
    try:
        return getattr(holder, name, None)
    except KeyError:
        return None


_current: ContextVar[RolloutUsage | None] = ContextVar("tunesmith_usage", default=None)


def get_usage() -> RolloutUsage:
    """The usage of the workflow that runs in this context."""
    usage = _current.get()
    assert usage is not None, "a measured model was opened"
    return usage


class MeasuredModel:
    """A provider whose rollouts have a `RolloutUsage` of their own, in the context of the rollout."""

    def __init__(self, provider: ModelProvider) -> None:
        self._provider = provider

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        bound = self._provider.open(seed=seed, order=order, sampling=sampling)
        _current.set(RolloutUsage(session=bound.session if isinstance(bound.session, Session) else None))
        return bound

    def close(self, bound: BoundModel) -> tuple[Turn, ...]:
        return self._provider.close(bound)


@contextlib.contextmanager
def counted_calls(model: Any) -> Iterator[None]:
    """Within: calls of a chat model add to the usage of the context they are made in."""
    before: Any = type(model)
    try:
        model.__class__ = _count_calls(before)
    except TypeError:  # a function, or a class with slots: its tokens stay unknown
        yield
        return
    try:
        yield
    finally:
        model.__class__ = before


@functools.cache
def _count_calls(model_class: Any) -> Any:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = await super(counted, self).__call__(*args, **kwargs)
        usage = _current.get()
        if usage is None:
            return reply
        if isinstance(reply, AsyncIterator):
            return _count_stream(reply, usage)
        usage.add(read_field(reply, "usage"))
        return reply

    names = {"__call__": call, "__module__": model_class.__module__, "__slots__": ()}
    counted: Any = type(model_class.__name__, (model_class,), names)
    return counted


async def _count_stream(chunks: AsyncIterator[Any], usage: RolloutUsage) -> AsyncIterator[Any]:
    """The chunks; the last one that states a usage has that of the whole reply."""
    stated = None
    try:
        async for chunk in chunks:
            stated = read_field(chunk, "usage") or stated
            yield chunk
    finally:
        usage.add(stated)
