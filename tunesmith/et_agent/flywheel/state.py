"""State of a flywheel: the trajectories of each question, and which attempts the next iteration makes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.config import FlywheelConfig
from tunesmith.environments.transcript import Transcript
from tunesmith.et_agent.flywheel.journal import AttemptPlan, Record
from tunesmith.et_agent.flywheel.operators import FOR_CORRECT
from tunesmith.rollout.seeds import derive_seed


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

    def is_new(self, transcript: Transcript) -> bool:
        return describe_text(transcript) not in self.texts

    def add(self, record: Record) -> None:
        """Take up an attempt that was made."""
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
        if record.outcome == "kept" and record.transcript is not None and not state.is_new(record.transcript):
            record = Record(plan=record.plan, outcome="duplicate", step=record.step, tokens=record.tokens)
        state.add(record)
        marked.append(record)
    return marked
