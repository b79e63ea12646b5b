"""A digest of everything that scores depend on, so that a killed measurement resumes with its own numbers only.

The code of workflow and judge is not part of it, only their names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.config import RunConfig
from tunesmith.model.source.adapter_files import ADAPTER_WEIGHTS
from tunesmith.model.source.fingerprint import compute_fingerprint
from tunesmith.storage import compute_checksum
from tunesmith.types import Task

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def compute_digest(settings: Mapping[str, Any], config: RunConfig, tasks: Sequence[Task], *more: Any) -> str:
    """Hash of the settings that scores depend on, the model's weights, the rows of the tasks and further values."""
    rows = [[task.task_id, dict(task.row)] for task in tasks]
    values = [dict(settings), describe_weights(config.model.path), rows, *more]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=describe_value).encode()).hexdigest()


def describe_value(value: Any) -> str:
    """A value of a row that JSON does not have, such as a date or an image, without its address in this process."""
    return ADDRESS.sub("", str(value))


def describe_weights(path: str) -> Any:
    """The fingerprint of a model's weights, or the checksum of an adapter's."""
    adapter = Path(path).expanduser() / ADAPTER_WEIGHTS
    return compute_checksum(adapter) if adapter.is_file() else compute_fingerprint(path)
