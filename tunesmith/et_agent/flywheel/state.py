"""State of a flywheel: its journal, the trajectories of each question, and which attempts the next iteration makes.

The state is a function of the journal, which has one line for each attempt, appended batch by batch. After a kill,
lines of an incomplete batch are removed and the batch is repeated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from tunesmith.config import FlywheelConfig
from tunesmith.environments.transcript import Transcript
from tunesmith.errors import ConfigError
from tunesmith.et_agent.flywheel.operators import FOR_CORRECT
from tunesmith.rollout.seeds import derive_seed
from tunesmith.runs.workspace import Workspace, check_same
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
    tokens: int = 0
    """Tokens that the stage's model sampled, in all roles."""
    transcript: Transcript | None = None

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        plan: dict[str, Any] = values.pop("plan")
        return plan | values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        plan = AttemptPlan(**{name: values.pop(name) for name in AttemptPlan.__dataclass_fields__})
        transcript = values.pop("transcript")
        return cls(plan=plan, transcript=None if transcript is None else Transcript.from_json(transcript), **values)


class Attempts:
    """The records of `attempts.jsonl`: settings and a digest of the questions in the first line, as others do not
    continue the file; then batches, each with a line at its end."""

    def __init__(self, workspace: Workspace, inputs: Mapping[str, Any]) -> None:
        self._journal = Journal(workspace.root / ATTEMPTS_FILE)
        self._saved: list[list[Record]] = []
        """Batches of an earlier attempt that are not taken yet."""
        if not self._journal.rows:
            self._journal.append(inputs)
            return
        header, *rows = self._journal.rows
        check_same(self._journal.path, header, inputs)
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


@dataclass(slots=True, kw_only=True)
class QuestionState:
    """A question with its attempts so far."""

    question_id: str
    row: Mapping[str, Any]
    num_attempts: int = 0
    kept: dict[int, Record] = field(default_factory=dict)
    """Number of an attempt -> its record, with a transcript and its correctness."""
    texts: set[str] = field(default_factory=set)
    """The kept trajectories without differences of spacing."""
    explored: set[int] = field(default_factory=set)
    """Numbers of the trajectories that operators were applied to."""

    def add(self, record: Record) -> None:
        self.num_attempts = max(self.num_attempts, record.plan.number + 1)
        if record.plan.parent is not None:
            self.explored.add(record.plan.parent)
        if record.outcome == "kept":
            assert record.transcript is not None
            self.kept[record.plan.number] = record
            self.texts.add(describe_text(record.transcript))


def describe_text(transcript: Transcript) -> str:
    return " ".join(transcript.text.split())


def is_correct(record: Record, config: FlywheelConfig) -> bool:
    return record.correctness is not None and record.correctness >= config.correct_at


def plan_iteration(state: QuestionState, iteration: int, config: FlywheelConfig) -> list[AttemptPlan]:
    """The attempts of an iteration on one question; iteration 0 has the first rollouts.

    If the operators of all parents would make more trajectories than the question may have, a seeded sample of them is
    tried.
    """
    if iteration == 0:
        choices: list[tuple[str, int | None]] = [("rollout", None)] * config.num_rollouts
    else:
        choices = [
            (operator, parent)
            for parent in list_parents(state, config)
            for operator in config.operators
            if (operator in FOR_CORRECT) == is_correct(state.kept[parent], config)
        ]
    places = max(config.max_per_question - len(state.kept), 0)
    if len(choices) > places:
        rng = random.Random(derive_seed(config.seed, "operators", state.question_id, iteration))
        choices = [choices[index] for index in sorted(rng.sample(range(len(choices)), places))]
    return [
        AttemptPlan(
            question_id=state.question_id,
            number=state.num_attempts + offset,
            iteration=iteration,
            operator=operator,
            parent=parent,
        )
        for offset, (operator, parent) in enumerate(choices)
    ]


def list_parents(state: QuestionState, config: FlywheelConfig) -> list[int]:
    """Trajectories that no operator was applied to: right ones first, then higher scores, fewer calls, older ones."""

    def rank(number: int) -> tuple[bool, float, int, int]:
        record = state.kept[number]
        assert record.transcript is not None and record.correctness is not None
        return not is_correct(record, config), -record.correctness, len(record.transcript.calls), number

    parents = sorted((number for number in state.kept if number not in state.explored), key=rank)
    return parents[: config.max_parents_per_question]


def find_fresh_records(records: Sequence[Record], states: Mapping[str, QuestionState]) -> list[Record]:
    """The records of a batch, in order, with trajectories that equal an earlier one marked as duplicates."""
    marked = []
    for record in records:
        state = states[record.plan.question_id]
        transcript = record.transcript if record.outcome == "kept" else None
        if transcript is not None and describe_text(transcript) in state.texts:
            record = Record(plan=record.plan, outcome="duplicate", step=record.step, tokens=record.tokens)
        state.add(record)
        marked.append(record)
    return marked
