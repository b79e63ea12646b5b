"""What scores depend on beside settings: the rows of the tasks and the weights of the model.

A killed measurement resumes with numbers of the same inputs only. The code of workflow and judge is not part of them,
only their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.model.source.adapter_files import ADAPTER_WEIGHTS
from tunesmith.model.source.fingerprint import compute_fingerprint
from tunesmith.storage import compute_checksum
from tunesmith.types import Task


def describe_rows(tasks: Sequence[Task]) -> list[list[Any]]:
    return [[task.task_id, dict(task.row)] for task in tasks]


def describe_weights(path: str) -> Any:
    """The fingerprint of a model's weights, or the checksum of an adapter's."""
    adapter = Path(path).expanduser() / ADAPTER_WEIGHTS
    return compute_checksum(adapter) if adapter.is_file() else compute_fingerprint(path)
