"""The error that a failed rank leaves for its launcher, in torchrun's file; and the end of a rank with its launcher."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path of the file, set by torchrun."""
LAUNCHED = "TUNESMITH_LAUNCHED"
"""Variable with the process id of `tunesmith` if it has started this rank itself, and prints its error."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun's agent, in its own program or in `tunesmith`, sets for ranks."""
WATCH_NAME = "tunesmith-launcher-watch"
WATCH_INTERVAL_S = 0.5
GRACE_S = 30.0


def is_launched() -> bool:
    """Whether the launcher prints errors of this process."""
    return LAUNCHED in os.environ


def record_rank_error(message: str, *, kind: str) -> None:
    """Write the error of this rank for the launcher; nothing if torchrun has not started this process."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    extra = {"py_callstack": kind, "timestamp": str(int(time.time()))}
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    except OSError:
        return  # the launcher then reports the exit status


def watch_launcher() -> None:
    """From now on, end this rank once its launcher was killed: with SIGTERM, and after `GRACE_S` at once.

    Nothing if neither `tunesmith` nor torchrun has started this process, or if the watch runs already.
    """
    if TORCHRUN not in os.environ or any(thread.name == WATCH_NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(os.getppid(),), name=WATCH_NAME, daemon=True).start()


def _watch(parent: int) -> None:
    launcher = int(os.environ.get(LAUNCHED, parent))  # one that was killed before this began is not the parent now
    while os.getppid() == parent and (parent == launcher or _is_running(launcher)):
        time.sleep(WATCH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        return True
    return True
