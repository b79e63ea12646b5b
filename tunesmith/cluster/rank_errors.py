"""What a rank leaves for its launcher when it fails, in the file that torchrun reads."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path of the file, set by torchrun."""
LAUNCHED = "TUNESMITH_LAUNCHED"
"""Variable that is set if `tunesmith` itself has started this rank, and prints its error."""


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
