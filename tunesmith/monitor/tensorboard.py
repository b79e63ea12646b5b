"""TensorBoard tracker, with TensorBoard's own event writer.

A resumed run opens a new event file that begins with a session start at the next step; readers then drop later steps of
earlier files, so curves show each step once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tunesmith.storage import storage_errors


class TensorBoardTracker:
    """Writes one event file per process."""

    def __init__(self, folder: Path, *, committed_step: int | None) -> None:
        self._folder = folder
        with storage_errors(folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)
            if committed_step is None:
                for path in folder.glob("events.out.tfevents.*"):
                    path.unlink()
            self._writer = EventFileWriter(str(folder))
            if committed_step is not None:
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=time.time(), step=committed_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with storage_errors(self._folder, "write"):
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()

    def close(self, *, is_failed: bool) -> None:
        """Close the file; TensorBoard has no status for failed runs."""
        with storage_errors(self._folder, "write"):
            self._writer.close()
