"""The journal of a flywheel: one line for each attempt, appended batch by batch.

The state of a flywheel is a function of its journal. After a kill, lines of an incomplete batch are removed and the
batch is repeated. The first line has the settings and a digest of the questions: others do not continue the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from tunesmith.environments.transcript import Transcript
from tunesmith.errors import ConfigError
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import Journal

Outcome = Literal["kept", "duplicate", "nothing", "unscored", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("kept", "duplicate", "nothing", "unscored", "failed")
"""kept: a new trajectory; duplicate: equal to an earlier one of the question; nothing: the operator had nothing to
change; unscored: the judge gave no verdict; failed: an error, which is not a wrong answer."""

ATTEMPTS_FILE = "attempts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
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

    plan: AttemptPlan
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
        plan = AttemptPlan(**{name: values.pop(name) for name in AttemptPlan.__dataclass_fields__})
        transcript = values.pop("transcript")
        return cls(plan=plan, transcript=None if transcript is None else Transcript.from_json(transcript), **values)


class Attempts:
    """The records of `attempts.jsonl`: the inputs in the first line, then batches, each with a line at its end.

    Records of an incomplete batch are removed.
    """

    def __init__(self, workspace: Workspace, inputs: Mapping[str, Any]) -> None:
        self._journal = Journal(workspace.root / ATTEMPTS_FILE)
        self._saved: list[list[Record]] = []
        """Batches of an earlier attempt that are not taken yet."""
        if not self._journal.rows:
            self._journal.append(inputs)
            return
        header, *rows = self._journal.rows
        workspace.check_same(header, inputs, place=self._journal.path)
        ends = [number for number, row in enumerate(rows) if "batch" in row]
        for start, end in pairwise([-1, *ends]):
            self._saved.append([Record.from_json(row) for row in rows[start + 1 : end]])
        self._journal.keep(1 if not ends else ends[-1] + 2)
        self._journal.rows.clear()

    def take(self, plans: Sequence[AttemptPlan]) -> list[Record] | None:
        """The saved records of the next batch; None if it is not saved."""
        if not self._saved:
            return None
        records = self._saved.pop(0)
        if [each.plan for each in records] != list(plans):
            raise ConfigError(
                f"{self._journal.path} has other attempts than this run would make: its questions or settings changed; "
                "remove it to begin again"
            )
        return records

    def add(self, records: Sequence[Record]) -> None:
        """Append a batch; it counts once its last line is on disk."""
        self._journal.append(*(each.to_json() for each in records), {"batch": len(records)})
