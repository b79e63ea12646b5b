"""Environments that speak as the user: `reset`, `step`, `close`, and `play`, the one workflow that plays them all.

An environment is a class of your own or one that a file names (`environment: reasoning_gym:countdown`). The adapters in
`sets` only translate; `play` sends the observations to the model and its replies to the environment, counts rewards,
and ends the episode.

Invariants: each rollout has an object of its own. What the model did wrong is an observation: text that `step` returns,
or the message of a `ToolInputError` that it raises. Every other exception, and a call that takes longer than
`step_timeout_s`, is a failure of the environment: the rollout has no reward. `close` is called exactly once for every
environment that was created, also after errors, time limits and cancellation; a session is open until it has returned.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import openai

from tunesmith.chat.client import create_chat_completion
from tunesmith.environments.environment import is_context_full
from tunesmith.errors import DataError, ToolUnavailableError
from tunesmith.tools.tool import ToolInputError
from tunesmith.types import WorkflowOutput

logger = logging.getLogger(__name__)

Step = tuple[str, float, bool]
"""Observation, reward, and whether the episode has ended."""
MAX_SEEDS_PER_TASK = 20
"""Seeds that are tried for each task before a set counts as too small."""
_numbers = itertools.count()
_open: dict[int, str] = {}
"""Names of the environments whose `close` has not returned, by session."""


class TextEnvironment(Protocol):
    """One episode of an environment. Methods are `async def`, or plain functions, which run in a thread."""

    def reset(self, task: Mapping[str, Any]) -> str | Awaitable[str]:
        """Begin the episode of a task, a row of the data set; returns the first observation."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Apply the model's reply. The reward of an episode is the sum over its steps."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds. After a time limit, the step that exceeded it may still run."""
        ...


@dataclass(slots=True)
class Session:
    """An open environment, and what has happened in it."""

    environment: TextEnvironment
    observation: str = ""
    """The last one."""
    rewards: list[float] = field(default_factory=list)
    """One of each step."""
    is_done: bool = False
    num_invalid: int = 0
    """Actions that the environment refused."""

    @property
    def metrics(self) -> dict[str, float]:
        """`finished` (the environment ended the episode), `invalid_actions`, and the environment's own `metrics`."""
        own = getattr(self.environment, "metrics", None) or {}
        return {"finished": float(self.is_done), "invalid_actions": float(self.num_invalid), **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnvironment:
    """An environment of a file, with its tasks: what a workflow's parameter `environment` is bound to."""

    name: str
    create: Callable[[], TextEnvironment]
    """Makes the object of one rollout; returns at once."""
    describe: Callable[[int], Mapping[str, Any]] | None = None
    """Further fields of the task with a seed. Tasks with equal ones are the same; without, each seed is a task."""
    system_prompt: str | None = None
    run: Callable[[Mapping[str, Any], Any], Awaitable[WorkflowOutput]] | None = None
    """Plays the episode of a task with a model that is served over HTTP, in place of `play`'s loop."""
    max_turns: int = 30
    step_timeout_s: float = 60.0
    step_reward_key: str | None = None
    """Metrics `<key>/<t>` report the reward of each step, for algorithms that read it (GiGPO)."""

    def list_rows(self, split: str, *, number: int, seed: int) -> list[dict[str, Any]]:
        """The first tasks of a split (`train` or `test`) from a seed on; DataError if there are fewer.

        The digest of a task decides its split, so the splits share no task whatever numbers and seeds are chosen.
        """
        rows: dict[str, dict[str, Any]] = {}
        seeds = iter(range(seed, seed + MAX_SEEDS_PER_TASK * number + 100))
        while len(rows) < number:
            given = next(seeds, None)
            if given is None:
                found = f"{len(rows)} different tasks of the split {split}"
                raise DataError(
                    f"environment {self.name!r} has only {found}, fewer than environment.num_{split}={number}"
                )
            fields = {} if self.describe is None else dict(self.describe(given))
            identity = repr(sorted(fields.items())) if fields else str(given)
            if find_split(identity) == split:
                rows.setdefault(identity, {"environment": self.name, "seed": given, **fields})
        return list(rows.values())

    @asynccontextmanager
    async def open(self, task: Mapping[str, Any]) -> AsyncIterator[Session]:
        """A session in which the episode of the task has begun; closes it at the end."""
        environment = self.create()
        number = next(_numbers)
        _open[number] = self.name
        session = Session(environment)
        try:
            observation = await self._call(environment.reset, "reset", task)
            session.observation = self._check_text(observation, "reset")
            yield session
        except BaseException:
            try:
                await self._close(environment, number)
            except Exception as error:  # noqa: BLE001 - user code; the first error is the cause
                logger.warning("%s: close failed after an error: %r", self.name, error)
            raise
        await self._close(environment, number)

    async def step(self, session: Session, action: str) -> None:
        """Apply an action to the session."""
        try:
            returned = await self._call(session.environment.step, "step", action)
        except ToolInputError as error:
            session.num_invalid += 1
            returned = f"Error: {error}", 0.0, False
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(
                f"{self.name}: step must return observation, reward and done, got {type(returned).__name__}"
            )
        observation, reward, is_done = returned
        session.observation = self._check_text(observation, "step")
        session.rewards.append(float(reward))
        session.is_done = bool(is_done)

    async def _close(self, environment: TextEnvironment, number: int) -> None:
        await self._call(environment.close, "close")
        del _open[number]

    async def _call(self, function: Callable[..., Any], what: str, *arguments: Any) -> Any:
        """The result of a function of the environment, a plain one in a thread; raises at the time limit."""
        limit = asyncio.timeout(self.step_timeout_s)
        try:
            async with limit:
                is_async = inspect.iscoroutinefunction(function)
                returned = function(*arguments) if is_async else await asyncio.to_thread(function, *arguments)
                return await returned if inspect.isawaitable(returned) else returned
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ToolUnavailableError(
                f"{self.name}: {what} was not done after environment.step_timeout_s={self.step_timeout_s:g}"
            ) from error

    def _check_text(self, observation: Any, what: str) -> str:
        if not isinstance(observation, str):
            raise TypeError(f"{self.name}: {what} must return text to observe, got {type(observation).__name__}")
        return observation


def find_split(identity: str) -> str:
    """The split of a task: one in four is held out."""
    return "train" if hashlib.sha256(identity.encode()).digest()[0] % 4 else "test"


def count_open_sessions() -> int:
    """Environments of this process that are not closed."""
    return len(_open)


async def play(task: Mapping[str, Any], model: Any, environment: TaskEnvironment) -> WorkflowOutput:
    """Play the episode of a task: observations are the user's messages, replies the actions.

    The episode ends with the environment, after `max_turns` replies, or when the context is full. The reward is the sum
    of all steps; the response is the last reply.
    """
    if environment.run is not None:
        return await environment.run(task, model)
    system = environment.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    reply = ""
    async with environment.open(task) as session:
        while not session.is_done and len(session.rewards) < environment.max_turns:
            messages.append({"role": "user", "content": session.observation})
            try:
                completion = await create_chat_completion(model, messages)
            except openai.BadRequestError as error:
                if not session.rewards or not is_context_full(error):
                    raise
                break
            message = completion.choices[0].message
            reply = message.content or ""
            reasoning = getattr(message, "reasoning_content", None)
            messages.append(
                {"role": "assistant", "content": reply} | ({"reasoning_content": reasoning} if reasoning else {})
            )
            await environment.step(session, reply)
        metrics = session.metrics
    if (key := environment.step_reward_key) is not None:
        metrics |= {f"{key}/{turn}": reward for turn, reward in enumerate(session.rewards)}
    metrics["open_sessions"] = float(count_open_sessions())
    return WorkflowOutput(reward=sum(session.rewards), response=reply, metrics=metrics)
