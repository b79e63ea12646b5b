"""Descriptions of failed rollouts: the message of an error, and the first failure of each kind in a step."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from tunesmith.errors import shorten
from tunesmith.types import Failure, JudgeOutput, Task, WorkflowOutput

PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
NOT_AWAITED = "; a call that returns a coroutine was not awaited: write `await` before it"
IN_PLAIN_FUNCTION = (
    "; a plain function got a coroutine from an async client: define it with `async def` and await the call, or use "
    "model.as_sync_openai_client()"
)
USE_MODEL = (
    "call `model`, or give your agent the client `model.client`, which is bound to this rollout: calls of another "
    "client are not trained"
)
CLIENT_ERRORS = {
    "Missing credentials": USE_MODEL,
    "'choices'": "`model` is AgentScope's, which is installed; replies have `choices` with rollout.chat_model=openai",
}
"""Beginnings of messages: of a client of the OpenAI SDK without arguments, of a reply of AgentScope's model."""
MAX_MESSAGE_CHARS = 2000
MAX_TRACEBACK_CHARS = 8000
"""Of a longer traceback the end is kept, where the error is."""
MAX_SHOWN_CHARS = 300
NUM_SHOWN_CAUSES = 5


class WorkerError(Exception):
    """What a worker outside of this process reported: its attempt has failed."""


class WorkerLostError(WorkerError):
    """A worker outside of this process ended without a report; the rollout may be attempted again."""


def describe_error(error: BaseException, task: Task) -> str:
    """Type and message of an error; for a missing field of the task, also the fields that exist."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    text = read_message(error).strip()
    if isinstance(error, ValidationError) and error.title in (JudgeOutput.__name__, WorkflowOutput.__name__):
        found = [(".".join(map(str, each["loc"])), each["msg"], each["input"]) for each in error.errors()]
        text = "; ".join(f"{error.title}.{key}={value!r}: {message}" for key, message, value in found)
    text = shorten(text, MAX_MESSAGE_CHARS)
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, KeyError) and error.args and error.args[0] not in task.row and not advise_on_client(error):
        message += f" (fields of the task: {', '.join(map(str, task.row))})"
    return message


def advise_on_coroutine(message: str, *, is_sync: bool) -> str:
    """What to change if the message of an error is about a coroutine, else nothing; `is_sync`: of a plain function."""
    if re.search(r"\bcoroutine\b", message) is None:
        return ""
    return IN_PLAIN_FUNCTION if is_sync else NOT_AWAITED


def advise_on_client(error: BaseException) -> str:
    """What to change if the error is known to be about how a workflow calls the model, else nothing."""
    return next((f"; {advice}" for start, advice in CLIENT_ERRORS.items() if read_message(error).startswith(start)), "")


def read_message(error: BaseException) -> str:
    """The message of an error of user code, whose `__str__` may raise too."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - user code
        return f"(its message cannot be read: {type(failed).__name__})"


def format_traceback(error: BaseException) -> str:
    """The traceback of an error in user code, from the first frame outside of this package."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.tb_next
    text = "".join(traceback.TracebackException(type(error), error, frame).format())
    return text if len(text) <= MAX_TRACEBACK_CHARS else f"...{text[-MAX_TRACEBACK_CHARS:]}"


def list_causes(failures: Iterable[Failure | None]) -> list[str]:
    """One line per kind of failure, most frequent first: its count, and the message and line of the first one. None is
    a rollout without one."""
    kinds: dict[Cause, list[Failure]] = {}
    for failure in failures:
        if failure is not None:
            kinds.setdefault(find_cause(failure.where, failure.message, failure.line), []).append(failure)
    ordered = sorted(kinds.values(), key=len, reverse=True)
    lines = [f"{len(alike)} x {describe_failure(alike[0])}" for alike in ordered[:NUM_SHOWN_CAUSES]]
    if len(ordered) > len(lines):
        lines.append(f"and {len(ordered) - len(lines)} more causes")
    return lines


def describe_failure(failure: Failure) -> str:
    """One line: the boundary, the message and the line of user code."""
    message = shorten(" ".join(failure.message.split()), MAX_SHOWN_CHARS)
    return f"{failure.where}: {message}" + (f" ({failure.line})" if failure.line else "")


class Cause(NamedTuple):
    """A kind of failure: where it happened, the error's type, and the line of user code."""

    where: str
    error: str
    """Without a line, the whole message."""
    line: str | None


def find_cause(where: str, message: str, line: str | None) -> Cause:
    """Failures have one cause if boundary, error type and line are equal; without a line, boundary and message."""
    return Cause(where, message.partition(":")[0] if line else message, line)


def describe_type(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
