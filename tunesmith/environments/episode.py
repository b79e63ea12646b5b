"""Environments that speak as the user: `reset`, `step`, `close`, and `play`, the one workflow that plays them all.

An environment is a class of your own or one that a file names (`environment: reasoning_gym:countdown`). The adapters in
`sets` only translate; `play` sends the observations to the model and its replies to the environment, counts rewards,
and ends the episode.

An environment may have `tools`: calls of a `Tool` are run and answered before the next `step`; calls of tools that are
only described, by a schema, reach `step` as `action.calls`. One with several players says in `player` whose turn it is.
A task is then a seat in a game: rollouts of a group play the same seat, so that advantages compare a seat with itself.

Invariants: each rollout has an object of its own. What the model did wrong is an observation: text that `step` returns,
or the message of a `ToolInputError` that it raises. Every other exception, and a call that takes longer than
`step_timeout_s`, is a failure of the environment: the rollout has no reward. `close` is called exactly once for every
environment that was created, also after errors, time limits and cancellation; a session is open until it has returned.

A branch of a rollout goes on with a copy of its parent's environment, from `copy`. If the class is declared
`is_deterministic`, a branch repeats the steps of its parent in an environment of its own instead. Other environments
cannot branch.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import hashlib
import inspect
import itertools
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import openai

from tunesmith.chat.client import create_chat_completion, read_reasoning
from tunesmith.environments.environment import is_context_full
from tunesmith.environments.protocols import read_calls, write_calls, write_result
from tunesmith.environments.toolbox import Toolbox
from tunesmith.environments.transcript import Segment
from tunesmith.errors import DataError, ToolUnavailableError
from tunesmith.rollout.open_sessions import SESSIONS
from tunesmith.rollout.time_limit import uncounted_time
from tunesmith.tool_log import CURRENT_LOG, record_call
from tunesmith.tools.tool import Tool, ToolInputError, name_kind
from tunesmith.types import WorkflowOutput

logger = logging.getLogger(__name__)

Observation = str | Sequence[Mapping[str, Any]]
"""Text that the user says, or chat messages with texts: results of calls, or the beginning of a conversation."""
Step = tuple[Observation, float | Sequence[float], bool]
"""Observation, reward (of each player, if there are several), and whether the episode has ended."""
MAX_SEEDS_PER_TASK = 20
"""Seeds that are tried for each task before a set counts as too small."""
MAX_GAMES = 5
"""Games that are begun for a rollout whose opponent ends each before the rollout's first turn."""
OPPONENT = "opponent"
"""The auxiliary model that plays the other seats; without it, they are played by the policy."""


class Reply(str):
    """A reply of the model: its text, and its tool calls.

    >>> Reply("I look.", [Segment(kind="call", text="{}", tool="look", arguments={})]).calls[0].tool
    'look'
    """

    calls: tuple[Segment, ...]

    def __new__(cls, text: str, calls: Sequence[Segment] = ()) -> Self:
        reply = super().__new__(cls, text)
        reply.calls = tuple(calls)
        return reply

    @property
    def response(self) -> str:
        """The text and the calls, each as JSON on a line of its own."""
        calls = [
            {"name": each.tool, "arguments": each.text if each.arguments is None else each.arguments}
            for each in self.calls
        ]
        return "\n".join([*([str(self)] if self else []), *(json.dumps(each, ensure_ascii=False) for each in calls)])


class TextEnvironment(Protocol):
    """One episode of an environment. Methods are `async def`, or plain functions, which run in a thread.

    Optional attributes: `tools`, a sequence of `Tool` or of schemas as in chat requests, read before each reply;
    `player`, the number of the player who reads the observation; `metrics`, read at the end; `is_deterministic` of the
    class, True if the same replies to a task always lead to the same state.

    Optional methods: `finish`, which returns the reward of an episode that `max_turns` or a full context ended; `copy`,
    which returns at once an environment in the same state that holds nothing to be closed until it is stepped.
    """

    def reset(self, task: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Begin the episode of a task, a row of the data set; returns the first observation."""
        ...

    def step(self, action: Reply) -> Step | Awaitable[Step]:
        """Apply the model's reply. The reward of an episode is the sum over its steps."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds. After a time limit, the step that exceeded it may still run."""
        ...


@dataclass(slots=True)
class Session:
    """An open environment, and what has happened in it."""

    environment: TextEnvironment
    seat: int = 0
    """The player whose rewards count."""
    has_players: bool = False
    observation: Observation = ""
    """The last one."""
    rewards: list[float] = field(default_factory=list)
    """One of each reply of the seat; the first also has what was paid before it."""
    is_done: bool = False
    num_invalid: int = 0
    """Actions of the seat that the environment refused, and calls that failed."""
    early_reward: float = 0.0
    """Paid before the first reply of the seat."""
    toolbox: Toolbox = field(
        default_factory=lambda: Toolbox(tools={}, max_calls=sys.maxsize, max_result_chars=sys.maxsize, has_state=True)
    )

    def pay(self, reward: Any) -> None:
        """Add the seat's reward to that of its last reply."""
        value = float(reward[self.seat] if self.has_players else reward)
        if self.rewards:
            self.rewards[-1] += value
        else:
            self.early_reward += value

    @property
    def player(self) -> int:
        """Who reads the observation."""
        return int(self.environment.player) if self.has_players else self.seat  # type: ignore[attr-defined]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The last observation as messages of a chat."""
        if isinstance(self.observation, str):
            return [{"role": "user", "content": self.observation}]
        return [dict(each) for each in self.observation]

    @property
    def tools(self) -> Sequence[Tool | Mapping[str, Any]]:
        """The tools of the next reply."""
        return getattr(self.environment, "tools", ())

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The tools of the next reply as a chat request has them."""
        return [each.schema if isinstance(each, Tool) else each for each in self.tools]

    @property
    def metrics(self) -> dict[str, float]:
        """`finished` (the environment ended the episode), `invalid_actions`, and the environment's own `metrics`."""
        own = getattr(self.environment, "metrics", None) or {}
        return {"finished": float(self.is_done), "invalid_actions": float(self.num_invalid), **own}


class Places:
    """A number of episodes at a time; others wait in order, and their wait counts toward no time limit."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        free = self._free.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._number))
        with uncounted_time():
            await free.acquire()
        try:
            yield
        finally:
            free.release()


@dataclass(frozen=True, slots=True)
class _Moved:
    """What a step returned, and the environment after it; a copy of the record has a copy of the environment."""

    returned: Any
    environment: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> _Moved:
        return _Moved(copy.deepcopy(self.returned, memo), self.environment.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnvironment:
    """An environment of a file, with its tasks: what a workflow's parameter `environment` is bound to."""

    name: str
    create: Callable[[], TextEnvironment]
    """Makes the object of one rollout; returns at once."""
    describe: Callable[[int], Mapping[str, Any]] | None = None
    """Further fields of the task with a seed. Tasks with equal ones are the same; without, each seed is a task."""
    rows: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    """The tasks of each split, of a set that has a fixed number; each has a `seed` of its own."""
    num_players: int = 1
    system_prompt: str | None = None
    run: Callable[[Mapping[str, Any], Any], Awaitable[WorkflowOutput]] | None = None
    """Plays the episode of a task with a model that is served over HTTP, in place of `play`'s loop."""
    max_turns: int = 30
    step_timeout_s: float = 60.0
    step_reward_key: str | None = None
    """Metrics `<key>/<t>` report the reward of each reply, for algorithms that read it (GiGPO)."""
    executor: Executor | None = None
    """Runs plain methods; by default that of the event loop."""
    places: Places | None = None
    """Limits the episodes at a time."""

    def list_rows(self, split: str, *, number: int, seed: int) -> list[dict[str, Any]]:
        """The first tasks of a split (`train` or `test`) from a seed on; DataError if there are fewer.

        The digest of a task decides its split, so the splits share no task whatever numbers and seeds are chosen. A set
        with a fixed number of tasks has its own splits, and gives at most all of one. Each seat of a game is a task.
        """
        if self.rows is not None:
            rows = self.rows[split]
            if not rows:
                advice = ": set eval_datasets={}" if split == "test" else ""
                raise DataError(f"environment {self.name!r} has no task of the split {split}{advice}")
            start = seed % len(rows)
            return [{"environment": self.name, **row} for row in [*rows[start:], *rows[:start]][:number]]
        found: dict[str, dict[str, Any]] = {}
        seeds = iter(range(seed, seed + MAX_SEEDS_PER_TASK * number + 100))
        while len(found) * self.num_players < number:
            given = next(seeds, None)
            if given is None:
                tasks = f"{len(found)} different tasks of the split {split}"
                raise DataError(
                    f"environment {self.name!r} has only {tasks}, fewer than environment.num_{split}={number}"
                )
            fields = {} if self.describe is None else dict(self.describe(given))
            identity = repr(sorted(fields.items())) if fields else str(given)
            if find_split(identity) == split:
                found.setdefault(identity, {"environment": self.name, "seed": given, **fields})
        seats = [{}] if self.num_players == 1 else [{"player": each} for each in range(self.num_players)]
        return [row | seat for row in found.values() for seat in seats][:number]

    def find_task(self, seed: int) -> dict[str, Any]:
        """The task with a seed, in its first seat."""
        if self.rows is not None:
            for row in itertools.chain.from_iterable(self.rows.values()):
                if row["seed"] == seed:
                    return {"environment": self.name, **row}
            number = sum(map(len, self.rows.values()))
            raise DataError(f"environment {self.name!r} has no task {seed}: its tasks are 0 to {number - 1}")
        seat = {"player": 0} if self.num_players > 1 else {}
        return {"environment": self.name, "seed": seed, **(self.describe(seed) if self.describe else {}), **seat}

    @property
    def cannot_branch(self) -> str | None:
        """Why a branch of a rollout cannot go on from the state of its parent's environment."""
        kind = self.create.func if isinstance(self.create, partial) else self.create
        if self.run is None and (hasattr(kind, "copy") or getattr(kind, "is_deterministic", False)):
            return None
        return (
            f"environment {self.name} has no method `copy`, nor does it declare `is_deterministic = True`, which "
            "lets a branch repeat the steps of its parent"
        )

    @asynccontextmanager
    async def open(self, task: Mapping[str, Any]) -> AsyncIterator[Session]:
        """A session in which the episode of the task has begun; closes it at the end."""
        has_players = self.num_players > 1
        async with nullcontext() if self.places is None else self.places.taken():
            session = Session(self.create(), int(task["player"]) if has_players else 0, has_players)
            SESSIONS["opened"] += 1
            try:
                async with session.toolbox:
                    returned = await self._call(session.environment.reset, "reset", task)
                    session.observation = self._check_text(returned, "reset")
                    yield session
            except BaseException:
                try:
                    await self._close(session.environment)
                except Exception as error:  # noqa: BLE001 - user code; the first error is the cause
                    logger.warning("%s: close failed after an error: %r", self.name, error)
                raise
            await self._close(session.environment)

    async def step(self, session: Session, action: str) -> None:
        """Apply an action to the session: run the calls of its tools, or let the environment answer."""
        reply = action if isinstance(action, Reply) else Reply(action)
        if is_own := session.player == session.seat:
            session.rewards.append(0.0 if session.rewards else session.early_reward)
        own_tools = {each.name: each for each in session.tools if isinstance(each, Tool)}
        if reply.calls and own_tools:
            session.toolbox.tools = own_tools
            run = partial(session.toolbox.run, reply.calls)
            has_sessions = any(each.is_stateful for each in own_tools.values())
            results = await (run() if has_sessions else self._move(session, reply, run))
            session.num_invalid += is_own * sum(not each.ok for each in results)
            session.observation = [write_result(each.call_id, each.text) for each in results]
            return
        try:
            call = partial(self._call, session.environment.step, "step", reply)
            returned = await self._move(session, reply, call)
        except ToolInputError as error:
            session.num_invalid += is_own
            returned = f"Error: {error}", (0.0,) * self.num_players if session.has_players else 0.0, False
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(
                f"{self.name}: step must return observation, reward and done, got {type(returned).__name__}"
            )
        observation, reward, is_done = returned
        observation = self._check_text(observation, "step")
        if reply.calls and isinstance(observation, str):
            observation = [write_result(each.call_id, observation) for each in reply.calls]
        session.observation, session.is_done = observation, bool(is_done)
        session.pay(reward)

    async def finish(self, session: Session) -> None:
        """Pay what an episode is worth that the environment has not ended."""
        if (finish := getattr(session.environment, "finish", None)) is not None and not session.is_done:
            session.pay(await self._call(finish, "finish"))

    async def _move(self, session: Session, reply: Reply, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a call that changes the environment. With `copy`, a branch gets it from its parent, with the
        environment after that call."""
        environment = session.environment
        if CURRENT_LOG.get() is None or not hasattr(environment, "copy"):
            return await call()

        async def make() -> _Moved:
            outer = CURRENT_LOG.set(None)  # the branch gets this call as a whole
            try:
                return _Moved(await call(), environment)
            finally:
                CURRENT_LOG.reset(outer)

        calls = [(each.tool, each.arguments) for each in reply.calls]
        moved = await record_call("step", {"reply": reply, "calls": calls}, make)
        if moved.environment is not environment:
            session.environment = moved.environment
            SESSIONS["opened"] += 1
            await self._close(environment)
        return moved.returned

    async def _close(self, environment: TextEnvironment) -> None:
        await self._call(environment.close, "close")
        SESSIONS["closed"] += 1

    async def _call(self, function: Callable[..., Any], what: str, *arguments: Any) -> Any:
        """The result of a function of the environment, a plain one in a thread; raises at the time limit."""
        limit = asyncio.timeout(self.step_timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*arguments)
                call = partial(contextvars.copy_context().run, function, *arguments)
                returned = await asyncio.get_running_loop().run_in_executor(self.executor, call)
                return await returned if inspect.isawaitable(returned) else returned
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ToolUnavailableError(
                f"{self.name}: {what} was not done after environment.step_timeout_s={self.step_timeout_s:g}"
            ) from error

    def _check_text(self, observation: Any, what: str) -> Observation:
        """The observation, if it is text or messages with texts."""
        if isinstance(observation, str):
            return observation
        wrong = observation
        if isinstance(observation, list | tuple) and all(isinstance(each, Mapping) for each in observation):
            contents = [each.get("content") for each in observation]
            if all(isinstance(each, str) for each in contents):
                return observation
            wrong = next(each for each in contents if not isinstance(each, str))
        raise TypeError(f"{self.name}: {what} must return text to observe, got {name_kind(wrong)}")


def find_split(identity: str) -> str:
    """The split of a task: one in four is held out."""
    return "train" if hashlib.sha256(identity.encode()).digest()[0] % 4 else "test"


async def play(task: Mapping[str, Any], model: Any, environment: TaskEnvironment) -> WorkflowOutput:
    """Play the episode of a task: observations are the user's messages, replies the actions.

    The episode ends with the environment, after `max_turns` replies, or when the context is full. The reward is the sum
    of all steps; the response is the last reply with its calls.
    """
    if environment.run is not None:
        return await environment.run(task, model)
    return await _play(task, environment, model, model)


async def play_seat(
    task: Mapping[str, Any], model: Any, environment: TaskEnvironment, auxiliary_models: Mapping[str, Any]
) -> WorkflowOutput:
    """As `play`, in the seat `task["player"]` of a game; the auxiliary model `opponent` has the other seats.

    Each player reads what the game tells that player, and their own replies.
    """
    for _ in range(MAX_GAMES):
        output = await _play(task, environment, model, auxiliary_models[OPPONENT])
        if output.response is not None:
            return output
    raise ToolUnavailableError(f"{environment.name}: {MAX_GAMES} games ended before the first turn of the rollout")


async def _play(task: Mapping[str, Any], environment: TaskEnvironment, model: Any, opponent: Any) -> WorkflowOutput:
    """An episode; its response is None if it ended before the first reply of the seat."""
    system = environment.system_prompt
    chats: dict[int, list[dict[str, Any]]] = {}
    reply = None
    async with environment.open(task) as session:
        for _ in range(environment.max_turns * environment.num_players):
            if session.is_done or len(session.rewards) == environment.max_turns:
                break
            is_own = session.player == session.seat
            chat = chats.setdefault(session.player, [{"role": "system", "content": system}] if system else [])
            chat += session.messages
            tools = session.schemas
            try:
                completion = await create_chat_completion(model if is_own else opponent, chat, tools=tools)
            except openai.BadRequestError as error:
                if not session.rewards or not is_context_full(error):
                    raise
                break
            message = completion.choices[0].message
            given = Reply(message.content or "", read_calls(message) if tools else ())
            reasoning = read_reasoning(message)
            chat.append(
                {"role": "assistant", "content": str(given)}
                | ({"reasoning_content": reasoning} if reasoning else {})
                | ({"tool_calls": write_calls(given.calls)} if given.calls else {})
            )
            reply = given.response if is_own else reply
            await environment.step(session, given)
        await environment.finish(session)
        metrics = session.metrics
    if (key := environment.step_reward_key) is not None:
        metrics |= {f"{key}/{turn}": reward for turn, reward in enumerate(session.rewards)}
    return WorkflowOutput(reward=sum(session.rewards), response=reply, metrics=metrics)
