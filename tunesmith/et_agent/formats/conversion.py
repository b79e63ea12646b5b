"""Convert one file between a format of ET-Agent's code and rows of tasks or transcripts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.environments.transcript import Transcript, find_format_error
from tunesmith.errors import ConfigError, DataError
from tunesmith.et_agent.formats.convert import EXPORTS, build_conversations, build_tasks, build_transcript_rows
from tunesmith.et_agent.formats.files import FORMATS, load_records, save_records
from tunesmith.storage import load_json_lines, save_text, storage_errors

IMPORTS = {"tasks": build_tasks, "transcripts": build_transcript_rows, "conversations": build_conversations}
EXPORTED = ("tasks", "transcripts")
"""Rows that the formats of the original can be written from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Result of a conversion."""

    path: Path
    target: str
    """Format of the file."""
    num_rows: int
    format_errors: Mapping[str, int]
    """Format errors of the transcripts that were written, as `rft_filter` would find them, and their number."""

    def __str__(self) -> str:
        errors = [f"  {count} transcripts with a format error: {name}" for name, count in self.format_errors.items()]
        return "\n".join([f"{self.path}: {self.num_rows} rows of {self.target}", *errors])


def convert_file(path: Path | str, *, source: str, target: str, out: Path | str) -> Conversion:
    """Read `path` in the format `source` and write `out` in the format `target`.

    One of the two is a format of the original (`files.FORMATS`), the other one of `IMPORTS`.
    """
    known, out = (*FORMATS, *IMPORTS), Path(out)
    for name, knob in ((source, "--from"), (target, "--to")):
        if name not in known:
            raise ConfigError(f"{knob} {name!r} is not a format: {', '.join(known)}")
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another file")
    if source in FORMATS and target in IMPORTS:
        rows = list(IMPORTS[target](load_records(path, source)))
        check_not_empty(rows, path)
        with storage_errors(out, "write"):
            out.parent.mkdir(parents=True, exist_ok=True)
        save_text(out, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
        return Conversion(path=out, target=target, num_rows=len(rows), format_errors=count_format_errors(rows))
    if source in EXPORTED and target in EXPORTS:
        with storage_errors(Path(path), "read"):
            records = EXPORTS[target](load_json_lines(Path(path)))
        check_not_empty(records, path)
        save_records(out, records, target)
        return Conversion(path=out, target=target, num_rows=len(records), format_errors={})
    raise ConfigError(
        f"{source} cannot be converted to {target}: convert a format of ET-Agent to {', '.join(IMPORTS)}, or "
        f"{' or '.join(EXPORTED)} to {', '.join(EXPORTS)}"
    )


def check_not_empty(rows: Sequence[Any], path: Path | str) -> None:
    if not rows:
        raise DataError(f"{str(path)!r} gives no rows")


def count_format_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The format errors of transcripts by kind: numbers of steps are left out."""
    transcripts = [Transcript.from_json(row["transcript"]) for row in rows if "transcript" in row]
    errors = [error for each in transcripts if (error := find_format_error(each)) is not None]
    return dict(Counter(errors).most_common())
