"""TensorBoard tracker: event files in TensorBoard's record format.

A resumed run opens a new event file that begins with a session start at the next step; readers then drop later steps of
earlier files, so curves show each step once. Readers take the files in the order of their names, which begin with a
time: a new file's time is after those of all others, also if a run is resumed within a second or on a host whose clock
is behind.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from tunesmith.monitor.tracker import TrackedRun
from tunesmith.storage import RunPaths, storage_errors

EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class TensorBoardTracker:
    """Writes one event file per process."""

    def __init__(self, run: TrackedRun, _: str) -> None:
        self._folder = folder = RunPaths(run.root).tensorboard
        with storage_errors(folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)
            earlier = {path: int(found[1]) for path in folder.iterdir() if (found := EVENT_FILE.match(path.name))}
            if run.committed_step is None:
                for path in earlier:
                    path.unlink()
            start = max([int(time.time()), *(second + 1 for second in earlier.values())])
            name = f"events.out.tfevents.{start:010d}.{socket.gethostname()}.{os.getpid()}"
            self._writer = RecordWriter((folder / name).open("wb"))
        self._write(Event(file_version="brain.Event:2"))
        if run.committed_step is not None:
            self._write(Event(step=run.committed_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def close(self, *, is_failed: bool) -> None:
        """Close the file; TensorBoard has no status for failed runs."""
        with storage_errors(self._folder, "write"):
            self._writer.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        with storage_errors(self._folder, "write"):
            self._writer.write(event.SerializeToString())
            self._writer.flush()
