"""Convert ET-Agent's records to the rows that Tunesmith's stages read, and back.

`tasks`: rows with `question`, `answer` (one or a list) and `source`, which data sets of tasks and the `pareto` stage
read. `transcripts`: rows with a structured `transcript` beside them, which the `rft_filter` stage reads.
`conversations`: the same trajectories as `messages`, which the `sft` stage reads. Text with tags is parsed here, once;
nothing that trains parses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tunesmith.environments.protocols import build_conversation
from tunesmith.environments.transcript import Transcript
from tunesmith.errors import ConfigError, DataError
from tunesmith.et_agent.formats.files import Record
from tunesmith.et_agent.formats.records import (
    AlpacaRow,
    EtQuestion,
    EtTrajectory,
    EvolveRow,
    RlRow,
    Rollout,
    RolloutRow,
    list_answers,
)
from tunesmith.et_agent.formats.tags import parse_trajectory
from tunesmith.judges.tir import find_known_ability

Row = dict[str, Any]
RIGHT_ABOVE = 0.8
"""Correctness above which the original's flywheel takes a trajectory for right: 1 of 0 and 1, or its token F1."""
CORRECTNESS, TOOL_CALLS = "pass_rate_correctness", "pass_rate_tool_calls"


def to_task(question: str, answer: Any, source: str | None, **more: Any) -> Row:
    row = {"question": question, "answer": answer, "source": source, **more}
    return {key: value for key, value in row.items() if value is not None}


def build_tasks(records: Sequence[Record]) -> Iterator[Row]:
    """One row per question."""
    for record in records:
        match record:
            case EtQuestion():
                yield to_task(record.question, record.answer, record.source, **record.extra)
            case EvolveRow():
                yield to_task(record.question, record.answer, record.source, system=record.instruction or None)
            case RolloutRow():
                task = to_task(record.question, record.answer, record.source, system=record.instruction or None)
                yield task | collect_rollout_numbers(record) | _describe_pareto(record.pareto)
            case RlRow():
                kind = "math" if record.is_math else "qa"
                yield to_task(record.question, list(record.answers), kind, system=record.system or None)
            case AlpacaRow():
                raise ConfigError("fine-tuning rows have no answers, so they are no tasks: convert them to transcripts")


def collect_rollout_numbers(record: RolloutRow) -> Row:
    """Correctness, if the rollouts are scored, and tool calls of each rollout, as the `pareto` stage reads them."""
    scores = [each.correctness for each in record.rollouts]
    calls = [float(each.tool_counts["total_times"]) for each in record.rollouts]
    return {TOOL_CALLS: calls} | ({CORRECTNESS: scores} if None not in scores else {})


def _describe_pareto(pareto: Mapping[str, float] | None) -> Row:
    """Front, from 0, and crowding distance, null for the ends of a front."""
    if pareto is None:
        return {}
    distance = float(pareto["distance"])
    return {"pareto_front": int(pareto["rank"]), "pareto_distance": None if distance == float("inf") else distance}


def build_transcript_rows(records: Sequence[Record]) -> Iterator[Row]:
    """One row per trajectory, in order."""
    for number, record in enumerate(records):
        match record:
            case EvolveRow():
                judged = [(each.text, float(each.is_correct), each.prediction) for each in record.trajectories]
                yield from _describe_trajectories(record, judged, number)
            case RolloutRow():
                scored = [(each.text, each.correctness, each.prediction) for each in record.rollouts]
                yield from _describe_trajectories(record, scored, number)
            case AlpacaRow():
                transcript = parse_trajectory(record.question, record.output)
                system = {"system": record.instruction} if record.instruction else {}
                yield {"question": record.question, **system, "transcript": transcript.to_json(), **record.extra}
            case _:
                raise ConfigError(f"{type(record).__name__} records hold no trajectories: convert them to tasks")


def build_conversations(records: Sequence[Record]) -> Iterator[Row]:
    """One conversation per trajectory, for the `sft` stage; results of tools are context."""
    for row in build_transcript_rows(records):
        transcript = Transcript.from_json(row["transcript"])
        yield build_conversation(transcript, system=row.get("system", ""), tools=())


def _describe_trajectories(
    record: EvolveRow | RolloutRow, texts: Sequence[tuple[str, float | None, str | None]], number: int
) -> Iterator[Row]:
    for index, (text, correctness, prediction) in enumerate(texts):
        numbers = {} if correctness is None else {"correctness": float(correctness)}
        yield {
            **to_task(record.question, record.answer, record.source, system=record.instruction or None),
            "question_id": number,
            "trajectory_index": index,
            **numbers,
            "prediction": prediction,
            "transcript": parse_trajectory(record.question, text).to_json(),
        }


def read_questions(rows: Iterable[Mapping[str, Any]]) -> list[EtQuestion]:
    """Source pool of task rows."""
    return [
        EtQuestion(question=need(row, "question", i), answer=need(row, "answer", i), source=row.get("source"))
        for i, row in enumerate(rows)
    ]


def read_rl_rows(rows: Iterable[Mapping[str, Any]]) -> list[RlRow]:
    """Training rows of reinforcement learning of task rows, in order; the index is the position."""
    return [
        RlRow(
            system=row.get("system") or "",
            question=need(row, "question", i),
            answers=tuple(list_answers(need(row, "answer", i))),
            is_math=find_known_ability(str(row.get("source", ""))) == "math",
            index=i,
        )
        for i, row in enumerate(rows)
    ]


def read_alpaca_rows(rows: Iterable[Mapping[str, Any]]) -> list[AlpacaRow]:
    """Fine-tuning rows of transcript rows."""
    return [
        AlpacaRow(
            instruction=row.get("system") or "",
            question=need(row, "question", i),
            output=read_transcript(row, i).text,
        )
        for i, row in enumerate(rows)
    ]


def read_evolve_rows(rows: Iterable[Mapping[str, Any]]) -> list[EvolveRow]:
    """Evolve buffers of transcript rows: those of one question together, in order of its first row."""
    found = []
    for index, group in group_rows(rows):
        trajectories = tuple(
            EtTrajectory(text=t.text, prediction=t.answer, is_correct=need(row, "correctness", index) > RIGHT_ABOVE)
            for row, t in group
        )
        found.append(EvolveRow(**_describe_question(group[0][0], index), trajectories=trajectories))
    return found


def read_rollout_rows(rows: Iterable[Mapping[str, Any]]) -> list[RolloutRow]:
    """Rollouts of transcript rows: those of one question together, in order of its first row."""
    found = []
    for index, group in group_rows(rows):
        rollouts = tuple(
            Rollout(
                text=transcript.text,
                prediction=transcript.answer,
                tool_counts=count_tools(transcript),
                correctness=row.get("correctness"),
            )
            for row, transcript in group
        )
        found.append(RolloutRow(**_describe_question(group[0][0], index), rollouts=rollouts))
    return found


def _describe_question(row: Mapping[str, Any], index: int) -> Row:
    return {
        "instruction": row.get("system") or "",
        "question": need(row, "question", index),
        "answer": need(row, "answer", index),
        "source": row.get("source") or "",
    }


def count_tools(transcript: Transcript) -> dict[str, int]:
    """Tool counts under the names of the original, from the recorded calls."""
    counts = transcript.tool_counts
    named = {f"{name}_times": counts.get(name, 0) for name in ("search", "python")}
    return {**named, "total_times": sum(counts.values())}


def group_rows(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, list[tuple[Mapping[str, Any], Transcript]]]]:
    """The rows of each question with their transcripts; equal ids of different questions are those of other files."""
    groups: dict[Any, tuple[int, list[tuple[Mapping[str, Any], Transcript]]]] = {}
    for index, row in enumerate(rows):
        key = row.get("question_id"), need(row, "question", index)
        groups.setdefault(key, (index, []))[1].append((row, read_transcript(row, index)))
    return list(groups.values())


def read_transcript(row: Mapping[str, Any], index: int) -> Transcript:
    transcript = Transcript.from_json(need(row, "transcript", index))
    if transcript.protocol != "tags":
        raise DataError(
            f"row {index} has a transcript of the protocol {transcript.protocol!r}; the original's formats hold text "
            "with tags"
        )
    return transcript


def need(row: Mapping[str, Any], key: str, index: int) -> Any:
    if row.get(key) is None:
        raise DataError(f"row {index} has no {key!r}; its fields are {', '.join(map(str, row))}")
    return row[key]


EXPORTS: dict[str, Callable[[Iterable[Mapping[str, Any]]], Sequence[Record]]] = {
    "et_pool": read_questions,
    "et_test": read_questions,
    "et_evolve": read_evolve_rows,
    "et_rft": read_alpaca_rows,
    "et_rollouts": read_rollout_rows,
    "et_rl": read_rl_rows,
}
"""Formats that can be written from rows; the ranks of `et_pareto` depend on the original's selection."""
