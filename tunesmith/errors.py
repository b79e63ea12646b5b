"""Errors that end a command with one sentence for the user.

Input errors are `ValueError`s that say what came, what is allowed and which knob to turn. The classes here name the
other boundaries a run can fail at; the command line prints their message and exits non-zero.
"""

from __future__ import annotations

import os
from types import FrameType

LOST_DEVICE_ADVICE = "the device is lost to this process: start the run again, and it goes on from its last checkpoint"
"""Part of every message about it."""


class TunesmithError(Exception):
    """A run cannot go on; the message says why and what to change."""


class ConfigError(TunesmithError, ValueError):
    """A setting is unknown, impossible or inconsistent."""


class DataError(TunesmithError, ValueError):
    """A data set is missing, empty, or lacks what the workflow needs."""


class MissingDataError(DataError, OSError):
    """There is nothing where a data set should be."""


class ModelError(TunesmithError, ValueError):
    """A model or tokenizer cannot be loaded, or cannot do what the run asks of it."""


class RolloutError(TunesmithError, RuntimeError):
    """Too many rollouts of a step failed; the message holds the first causes."""


class TrainingError(TunesmithError, RuntimeError):
    """An update cannot be trusted: a non-finite loss, or sampler and trainer disagree."""


class StorageError(TunesmithError, OSError):
    """A run folder cannot be written or read; nothing already written was changed."""


class EngineError(TunesmithError, RuntimeError):
    """The sampler cannot finish a request: its step failed, or the model's logits are not finite."""


def end_on_signal(number: int, frame: FrameType | None) -> None:
    """A signal handler that ends the command as a failed one, with the status that a shell gives for the signal."""
    os.write(2, b"tunesmith: SIGTERM: ending\n")
    raise SystemExit(128 + number)
