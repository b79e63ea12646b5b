"""Convert ET-Agent's records to the rows that Tunesmith's stages read, and back.

`tasks`: rows with `question`, `answer` (one or a list) and `source`, which data sets of tasks and the `pareto` stage
read. `transcripts`: rows with a structured `transcript` beside them, which the `rft_filter` stage reads.
`conversations`: the same trajectories as `messages`, which the `sft` stage reads. Text with tags is parsed here, once;
nothing that trains parses it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.environments.protocols import build_conversation
from tunesmith.environments.transcript import ANSWER_CLOSE, ANSWER_OPEN, Finish, Segment, Transcript, find_format_error
from tunesmith.errors import ConfigError, DataError
from tunesmith.et_agent.formats.files import (
    FORMATS,
    AlpacaRow,
    EtQuestion,
    EtTrajectory,
    EvolveRow,
    Record,
    RlRow,
    Rollout,
    RolloutRow,
    list_answers,
    load_records,
    save_records,
)
from tunesmith.judges.tir import find_known_ability
from tunesmith.storage import load_json_lines, save_text, storage_errors
from tunesmith.tools.tool import FailureKind

TOOL_ARGUMENTS: Mapping[str, str] = {"search": "query", "python": "code"}
"""The tools of the original, and the argument that the text of the tag is."""
RESULT = re.compile(r"\s*<result>(.*?)</result>", re.DOTALL)
TIMEOUT = re.compile(r"execution timeout|timed out|TimeoutError", re.IGNORECASE)
ERROR = re.compile(
    r"\ATraceback \(most recent call last\)|^\w*(?:Error|Exception)\b.*\Z|\AError:|\ALocal search failed"
    r"|\Ainvalid query|\ATool\(\w+\) returned empty output",
    re.MULTILINE,
)


def parse_trajectory(question: str, text: str, *, arguments: Mapping[str, str] = TOOL_ARGUMENTS) -> Transcript:
    """The transcript of a trajectory's text; `arguments` maps the tags of tools to the argument that they hold.

    A `<result>` counts as the environment's only directly after a call; anywhere else the model wrote it, and it stays
    part of a thought. The segments have the whole text without trailing space. Token counts are unknown and 0.
    """
    written = text.rstrip()
    call = re.compile(rf"<({'|'.join(map(re.escape, arguments))})>(.*?)</\1>", re.DOTALL)
    segments: list[Segment] = []
    start = position = 0
    while (found := call.search(written, position)) is not None:
        result = RESULT.match(written, found.end())
        position = found.end()
        if result is None and found.end() < len(written):
            continue  # a call that the environment never ran is text of the model
        if found.start() > start:
            segments.append(Segment(kind="thought", text=written[start : found.start()]))
        call_id = f"call{sum(each.kind == 'call' for each in segments) + 1}"
        segments.append(_read_call(found, arguments, call_id))
        if result is not None:
            segments.append(_read_result(found[1], result, call_id))
            position = result.end()
        start = position
    segments += _read_rest(written[start:])
    finish: Finish = "answered" if segments and segments[-1].kind == "answer" else "no_answer"
    return Transcript(question=question, segments=tuple(segments), finish=finish, protocol="tags")


def _read_call(found: re.Match[str], arguments: Mapping[str, str], call_id: str) -> Segment:
    body = found[2].strip("\n")
    given = {arguments[found[1]]: body if "\n" in body else body.strip()} if body.strip() else None
    return Segment(kind="call", text=found[0], tool=found[1], arguments=given, call_id=call_id)


def _read_result(tool: str, found: re.Match[str], call_id: str) -> Segment:
    inner = found[1].strip()
    failure = find_failure(inner)
    return Segment(
        kind="result", text=found[0], tool=tool, result=inner, ok=not failure, failure=failure, call_id=call_id
    )


def _read_rest(text: str) -> list[Segment]:
    """The text after the last result: a thought, and the answer if the text ends with it."""
    start = text.rfind(ANSWER_OPEN)
    if start < 0 or not text.endswith(ANSWER_CLOSE):
        return [Segment(kind="thought", text=text)] if text else []
    thought = [Segment(kind="thought", text=text[:start])] if start else []
    return [*thought, Segment(kind="answer", text=text[start:])]


def find_failure(result: str) -> FailureKind:
    """Whether a result reports a failed call: `timeout`, `error`, or empty for a success.

    An empty result is a failure, as in the original. Its other rule, any text with the word "error", would count
    documents about errors; here the text must begin as the messages of the original's tools do, or end in the line of
    an exception.
    """
    if not result or ERROR.search(result):
        return "timeout" if TIMEOUT.search(result) else "error"
    return "timeout" if len(result) < 200 and TIMEOUT.search(result) else ""


Row = dict[str, Any]
RIGHT_ABOVE = 0.8
"""Correctness above which the original's flywheel takes a trajectory for right: 1 of 0 and 1, or its token F1."""
CORRECTNESS, TOOL_CALLS = "pass_rate_correctness", "pass_rate_tool_calls"


def to_task(question: str, answer: Any, source: str | None, **more: Any) -> Row:
    row = {"question": question, "answer": answer, "source": source, **more}
    return {key: value for key, value in row.items() if value is not None}


def build_tasks(records: Sequence[Record]) -> Iterator[Row]:
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
