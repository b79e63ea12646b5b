"""Errors whose message is printed to the user when a command fails.

Input errors are `ValueError`s that state the value, what is allowed and which knob to change. The classes name the
boundary at which a run failed; the command line prints their message and exits with a non-zero status.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

LOST_DEVICE_ADVICE = (
    "the device can no longer be used by this process: restart the run to resume from its last checkpoint"
)
"""Part of every error message about a lost device."""


@contextmanager
def errors_of(section: str, keys: Iterable[str] = ()) -> Iterator[None]:
    """Errors name the section of a config that they are about: `model.KEY` is its key for these keys, and errors that
    do not name it begin with it."""
    try:
        yield
    except TunesmithError as error:
        renamed = rf"(?<![\w./'])model\.(?=(?:{'|'.join(keys)})\b)" if keys else "(?!)"
        message = re.sub(renamed, lambda _: f"{section}.", str(error))
        is_named = re.search(rf"(?<![\w./']){re.escape(section)}[.:=]", message)
        error.args = (message if is_named else f"{section}: {message}", *error.args[1:])
        raise


class TunesmithError(Exception):
    """A run cannot continue; the message states the cause and what to change."""


class ConfigError(TunesmithError, ValueError):
    """A setting is unknown, invalid or inconsistent with others."""


class DataError(TunesmithError, ValueError):
    """A data set is missing, empty, or lacks required fields."""


class MissingDataError(DataError, OSError):
    """A data set does not exist."""


class ModelError(TunesmithError, ValueError):
    """A model or tokenizer cannot be loaded, or does not support the settings of the run."""


class RolloutError(TunesmithError, RuntimeError):
    """Too many rollouts of a step failed; the message lists the first causes."""


class TrainingError(TunesmithError, RuntimeError):
    """An update cannot be trusted: a non-finite loss, or sampler and trainer disagree."""


class RankError(TunesmithError, RuntimeError):
    """Another rank of the run has ended or does not answer, so this one cannot continue."""


class CallbackError(TunesmithError, RuntimeError):
    """A callback of the user raised, or returned something that it may not."""


class StorageError(TunesmithError, OSError):
    """A file or run folder cannot be written or read; existing files are unchanged."""


class ReplayError(TunesmithError, RuntimeError):
    """A branch of a rollout made another request than its parent did, so it does not continue its parent."""


class EngineError(TunesmithError, RuntimeError):
    """The engine cannot finish a request: a step failed, or the model's logits are not finite."""


class ToolUnavailableError(TunesmithError, RuntimeError):
    """A tool cannot answer for reasons of ours, such as a dead server; it ends the rollout as a failure."""


class ServerLostError(ToolUnavailableError):
    """A server that a rollout used has ended; it is started again, and the rollout is made again."""


class SandboxError(ToolUnavailableError):
    """The sandbox of a tool cannot run code; nothing is known about the code."""


def lacks_host_memory(error: BaseException) -> bool:
    """Whether memory of the host, not of a GPU, could not be allocated, by Python, numpy or torch."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Signal handler that exits with the shell's status for the signal, 128 + number."""
    os.write(2, b"tunesmith: SIGTERM: exiting\n")
    raise SystemExit(128 + number)


def first_line(error: BaseException) -> str:
    """The first line of a message that is not empty, else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
