"""The journal of a flywheel: one line for each attempt, appended batch by batch.

The state of a flywheel is a function of its journal. After a kill, lines of an incomplete batch are removed and the
batch is repeated. The first line has digests of the settings and of the questions: others do not continue the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tunesmith.environments.transcript import Transcript
from tunesmith.errors import ConfigError
from tunesmith.storage import storage_errors

Outcome = Literal["kept", "duplicate", "nothing", "unscored", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("kept", "duplicate", "nothing", "unscored", "failed")
"""kept: a new trajectory; duplicate: equal to an earlier one of the question; nothing: the operator had nothing to
change; unscored: the judge gave no verdict; failed: an error, which is not a wrong answer."""

OTHER_ATTEMPTS = "{path} has other attempts than this run would make: its {what} changed; remove it to begin again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An attempt before it is made: which operator on which trajectory of which question."""

    question_id: str
    number: int
    """Of the question's attempts, from 0; also the id of the trajectory that comes of it."""
    iteration: int
    operator: str
    parent: int | None
    """Number of the attempt whose trajectory is the parent."""

    @property
    def trajectory_id(self) -> str:
        return f"{self.question_id}#{self.number}"

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else f"{self.question_id}#{self.parent}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An attempt and its outcome: one line."""

    plan: Plan
    outcome: Outcome
    step: int | None = None
    reason: str = ""
    correctness: float | None = None
    transcript: Transcript | None = None
    tokens: int = 0
    """Tokens that the stage's model sampled, in all roles."""

    def to_json(self) -> dict[str, Any]:
        values = {
            **asdict(self.plan),
            "outcome": self.outcome,
            "step": self.step,
            "reason": self.reason,
            "correctness": self.correctness,
            "tokens": self.tokens,
        }
        return values | {"transcript": None if self.transcript is None else self.transcript.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        plan = Plan(**{name: values.pop(name) for name in Plan.__dataclass_fields__})
        transcript = values.pop("transcript")
        return cls(plan=plan, transcript=None if transcript is None else Transcript.from_json(transcript), **values)


class Journal:
    """The records of a file; complete batches alone."""

    def __init__(self, path: Path, *, digest: str, questions: str, seed: int) -> None:
        """`digest` is that of the settings, `questions` that of the rows."""
        self._path = path
        self._header = {"digest": digest, "questions": questions, "seed": seed}
        self._saved: list[list[Record]] = []
        """Batches of an earlier attempt that are not taken yet."""
        with storage_errors(path, "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._load()
            else:
                self._append([self._header])

    def take(self, plans: Sequence[Plan]) -> list[Record] | None:
        """The saved records of the next batch; None if it is not saved."""
        if not self._saved:
            return None
        records = self._saved.pop(0)
        if [each.plan for each in records] != list(plans):
            raise ConfigError(OTHER_ATTEMPTS.format(path=self._path, what="questions or settings"))
        return records

    def add(self, records: Sequence[Record]) -> None:
        """Append a batch; it counts once its last line is on disk."""
        self._append([*(each.to_json() for each in records), {"batch": len(records)}])

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with storage_errors(self._path, "write"), self._path.open("ab") as file:
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()
            os.fsync(file.fileno())

    def _load(self) -> None:
        """Read the complete batches, and remove the lines after the last of them."""
        batch: list[Record] = []
        num_bytes = num_complete = 0
        header = None
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            num_bytes += len(line)
            row = json.loads(line)
            if header is None:
                header, num_complete = row, num_bytes
            elif "batch" in row:
                self._saved.append(batch)
                batch, num_complete = [], num_bytes
            else:
                batch.append(Record.from_json(row))
        # files of earlier versions have no digest of the questions
        if header is not None and {**self._header, **header} != self._header:
            if header["digest"] != self._header["digest"]:
                raise ConfigError(f"{self._path} was written with other settings; remove it to begin again")
            raise ConfigError(OTHER_ATTEMPTS.format(path=self._path, what="questions"))
        os.truncate(self._path, num_complete)
        if header is None:
            self._append([self._header])
