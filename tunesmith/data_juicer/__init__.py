"""Apply operators of Data-Juicer to rows, through its own package (py-data-juicer), in a process of its own.

The process runs in an interpreter that has the package, this one or another: Data-Juicer pins old versions of packages
that others share, and installs what an operator lacks into its interpreter while it runs. It is not allowed to here, so
a missing package is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, DataError

PROGRAM = Path(__file__).with_name("program.py")
OFFLINE = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}
Recipe = Sequence[Mapping[str, Mapping[str, Any] | None]]
"""Operators as in the `process` of Data-Juicer's files: `[{name: arguments}, ...]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow:
    """A row that the operators kept, with their changes.

    >>> kept = KeptRow(index=3, row={"question": "3 + 4 = ?"}, stats={"text_len": 9.0})
    """

    index: int
    row: Mapping[str, Any]
    stats: Mapping[str, float]
    """Numbers that the operators computed, by Data-Juicer's names; without the scores of models that did not answer."""
    num_failed: int = 0
    """Scores of models that did not answer, for which Data-Juicer writes 0."""


def apply_recipe(
    rows: Sequence[Mapping[str, Any]], process: Recipe, *, text_key: str, num_proc: int, python: str | None
) -> list[KeptRow]:
    """The rows that are kept. Without rows, operators and arguments are checked alone."""
    request = {"process": [dict(each) for each in process], "rows": list(rows), "text_key": text_key, "np": num_proc}
    try:
        done = subprocess.run(
            [python or sys.executable, "-P", str(PROGRAM)],
            input=json.dumps(request, default=str),
            capture_output=True,
            text=True,
            env=os.environ | OFFLINE,
        )
    except OSError as error:
        raise ConfigError(f"operator data_juicer: python={python!r} cannot be run: {error}") from error
    if done.returncode:
        last = (done.stderr.strip() or "no message").rsplit("\n", 1)[-1]
        raise DataError(f"operator data_juicer: Data-Juicer ended with code {done.returncode}: {last}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise ConfigError(f"operator data_juicer: {answer['refused']}")
    kept = [KeptRow(**each) for each in answer["kept"]]
    if kept and all(each.num_failed for each in kept):
        raise DataError(
            f"operator data_juicer: the model of an operator gave no score for any of {len(kept)} rows; Data-Juicer "
            "reads its address and key from OPENAI_BASE_URL and OPENAI_API_KEY"
        )
    return kept
