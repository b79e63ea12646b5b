"""Convert the rows of ET-Agent's files to the rows that Tunesmith's stages read, and back.

`tasks`: rows with `question`, `answer` (one or a list) and `source`, which data sets of tasks and the `pareto` stage
read. `transcripts`: rows with a structured `transcript` beside them, which the `rft_filter` stage reads.
`conversations`: the same trajectories as `messages`, which the `sft` stage reads. Text with tags is parsed here, once;
nothing that trains parses it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tunesmith.environments.protocols import build_conversation, read_tag
from tunesmith.environments.transcript import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    Finish,
    Segment,
    Transcript,
    find_format_error,
    read_transcript,
)
from tunesmith.errors import ConfigError, DataError
from tunesmith.et_agent.formats.files import EVOLVE_LISTS, FORMATS, Row, find_question_key, load_records, save_records
from tunesmith.judges.tir import find_known_ability
from tunesmith.tasks.load import check_finite, load_jsonl, read_field, write_rows
from tunesmith.tools.tool import FailureKind

TOOL_ARGUMENTS: Mapping[str, str] = {"search": "query", "python": "code"}
"""The tools of the original, and the argument that the text of the tag is."""
CALL = re.compile(rf"<({'|'.join(TOOL_ARGUMENTS)})>(.*?)</\1>", re.DOTALL)
RESULT = re.compile(r"\s*<result>(.*?)</result>", re.DOTALL)
TIMEOUT = re.compile(r"execution timeout|timed out|TimeoutError", re.IGNORECASE)
ERROR = re.compile(
    r"\ATraceback \(most recent call last\)|^\w*(?:Error|Exception)\b.*\Z|\AError:|\ALocal search failed"
    r"|\Ainvalid query|\ATool\(\w+\) returned empty output",
    re.MULTILINE,
)


def parse_trajectory(question: str, text: str) -> Transcript:
    """The transcript of a trajectory's text.

    A `<result>` counts as the environment's only directly after a call; anywhere else the model wrote it, and it stays
    part of a thought. The segments have the whole text without trailing space. Token counts are unknown and 0.
    """
    written = text.rstrip()
    segments: list[Segment] = []
    start = position = 0
    while (found := CALL.search(written, position)) is not None:
        result = RESULT.match(written, found.end())
        position = found.end()
        if result is None and found.end() < len(written):
            continue  # a call that the environment never ran is text of the model
        if found.start() > start:
            segments.append(Segment(kind="thought", text=written[start : found.start()]))
        call_id = f"call{sum(each.kind == 'call' for each in segments) + 1}"
        segments.append(_read_call(found, call_id))
        if result is not None:
            segments.append(_read_result(found[1], result, call_id))
            position = result.end()
        start = position
    segments += _read_rest(written[start:])
    finish: Finish = "answered" if segments and segments[-1].kind == "answer" else "no_answer"
    return Transcript(question=question, segments=tuple(segments), finish=finish, protocol="tags")


def _read_call(found: re.Match[str], call_id: str) -> Segment:
    arguments = read_tag(found[2], TOOL_ARGUMENTS[found[1]])
    return Segment(kind="call", text=found[0], tool=found[1], arguments=arguments, call_id=call_id)


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


RIGHT_ABOVE = 0.8
"""Correctness above which the original's flywheel takes a trajectory for right: 1 of 0 and 1, or its token F1."""
CORRECTNESS, TOOL_CALLS = "pass_rate_correctness", "pass_rate_tool_calls"


def to_task(question: str, answer: Any, source: str | None, **more: Any) -> Row:
    row = {"question": question, "answer": answer, "source": source, **more}
    return {key: value for key, value in row.items() if value is not None}


def build_tasks(rows: Sequence[Row], source: str) -> Iterator[Row]:
    for number, row in enumerate(rows):
        match source:
            case "et_pool" | "et_test":
                key = find_question_key(row)
                more = {name: value for name, value in row.items() if name not in (key, "answer", "source")}
                yield to_task(row[key], row["answer"], row.get("source"), **more)
            case "et_evolve":
                yield describe_task(row)
            case "et_rollouts" | "et_pareto":
                yield describe_task(row) | collect_rollout_numbers(row) | _describe_pareto(row)
            case "et_rl":
                prompt = {each["role"]: each["content"] for each in row["prompt"]}
                question = row["extra_info"].get("question") or prompt.get("user")
                if question is None:
                    raise DataError(f"row {number} has neither extra_info.question nor a user message in prompt")
                answers, kind = list_answers(row["reward_model"]["ground_truth"]), row["ability"]
                yield to_task(question, answers, kind if kind == "math" else "qa", system=prompt.get("system") or None)
            case _:
                raise ConfigError("fine-tuning rows have no answers, so they are no tasks: convert them to transcripts")


def describe_task(row: Row) -> Row:
    """The question of an evolve buffer or of rollouts, as a task."""
    return to_task(row["input"], row["answer"], row["source"], system=row["instruction"] or None)


def list_answers(answer: Any) -> list[str]:
    """The accepted answers as texts, of one answer, a list or none; the AIME test files have numbers."""
    if answer is None:
        return []
    return [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]


def collect_rollout_numbers(row: Row) -> Row:
    """Correctness, if the rollouts are scored, and tool calls of each rollout, as the `pareto` stage reads them."""
    scores = row.get("correctness")
    calls = [float(each["total_times"]) for each in row["tool_counts"]]
    return {TOOL_CALLS: calls} | ({CORRECTNESS: scores} if scores is not None and None not in scores else {})


def _describe_pareto(row: Row) -> Row:
    """Front, from 0, and crowding distance, null for the ends of a front."""
    if "rank" not in row:
        return {}
    distance = float(row["distance"])
    return {"pareto_front": int(row["rank"]), "pareto_distance": None if distance == float("inf") else distance}


def build_transcript_rows(rows: Sequence[Row], source: str) -> Iterator[Row]:
    """One row per trajectory, in order."""
    for number, row in enumerate(rows):
        match source:
            case "et_evolve":
                texts, predictions, verdicts = (row[key] for key in EVOLVE_LISTS)
                scores = [float(bool(each)) for each in verdicts]
            case "et_rollouts" | "et_pareto":
                texts, predictions = row["rollout_outputs"], row["predictions"]
                scores = row.get("correctness") or [None] * len(texts)
            case "et_rft":
                transcript = parse_trajectory(row["input"], row["output"])
                system = {"system": row["instruction"]} if row["instruction"] else {}
                more = {name: value for name, value in row.items() if name not in FORMATS[source].fields}
                yield {"question": row["input"], **system, "transcript": transcript.to_json(), **more}
                continue
            case _:
                raise ConfigError(f"{source} holds no trajectories: convert it to tasks")
        for index, (text, prediction, score) in enumerate(zip(texts, predictions, scores, strict=True)):
            yield {
                **describe_task(row),
                "question_id": number,
                "trajectory_index": index,
                **({} if score is None else {"correctness": float(score)}),
                "prediction": prediction,
                "transcript": parse_trajectory(row["input"], text).to_json(),
            }


def build_conversations(rows: Sequence[Row], source: str) -> Iterator[Row]:
    """One conversation per trajectory, for the `sft` stage; results of tools are context."""
    for row in build_transcript_rows(rows, source):
        transcript = Transcript.from_json(row["transcript"])
        yield build_conversation(transcript, system=row.get("system", ""), tools=())


class ExportedRow(NamedTuple):
    """A row with a transcript, and its place in the file."""

    number: int
    row: Mapping[str, Any]
    transcript: Transcript


def read_questions(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [to_task(need(row, "question", i), need(row, "answer", i), row.get("source")) for i, row in enumerate(rows)]


def read_rl_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Training rows of reinforcement learning of task rows, in order; the index is the position."""
    found = []
    for index, row in enumerate(rows):
        question, answers = need(row, "question", index), list_answers(need(row, "answer", index))
        ability = "math" if find_known_ability(str(row.get("source", ""))) == "math" else "qa"
        system = [{"content": row["system"], "role": "system"}] if row.get("system") else []
        found.append(
            {
                "data_source": f"{ability}_effi_rl",
                "prompt": [*system, {"content": question, "role": "user"}],
                "ability": ability,
                "reward_model": {"ground_truth": answers, "style": "rule"},
                "extra_info": {"index": index, "need_tools_kwargs": False, "question": question, "split": "train"},
                "metadata": None,
            }
        )
    return found


def read_alpaca_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [
        {
            "instruction": row.get("system") or "",
            "input": need(row, "question", i),
            "output": read_tagged(row, i).text,
        }
        for i, row in enumerate(rows)
    ]


def read_evolve_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Evolve buffers of transcript rows: those of one question together, in order of its first row."""
    return [
        {
            **_describe_question(group),
            "initial_output": "",
            "prediction": "",
            "initial_logs": [],
            "evolve_trajectories_buffer": [each.transcript.text for each in group],
            "evolve_predictions": [each.transcript.answer for each in group],
            "evolve_trajectories_llm_judge_results": [
                need(each.row, "correctness", each.number) > RIGHT_ABOVE for each in group
            ],
            "evolve_judgements": [],
        }
        for group in group_rows(rows)
    ]


def read_rollout_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rollouts of transcript rows: those of one question together, in order of its first row."""
    found = []
    for group in group_rows(rows):
        scores = [each.row.get("correctness") for each in group]
        question = {
            **_describe_question(group),
            "rollout_outputs": [each.transcript.text for each in group],
            "predictions": [each.transcript.answer for each in group],
            "tool_counts": [count_tools(each.transcript) for each in group],
        }
        found.append(question if None in scores else question | {"correctness": scores})
    return found


def _describe_question(group: Sequence[ExportedRow]) -> Row:
    index, row = group[0].number, group[0].row
    return {
        "instruction": row.get("system") or "",
        "input": need(row, "question", index),
        "answer": need(row, "answer", index),
        "source": row.get("source") or "",
    }


def count_tools(transcript: Transcript) -> dict[str, int]:
    """Tool counts under the names of the original, from the recorded calls."""
    counts = transcript.tool_counts
    named = {f"{name}_times": counts.get(name, 0) for name in ("search", "python")}
    return {**named, "total_times": sum(counts.values())}


def group_rows(rows: Iterable[Mapping[str, Any]]) -> list[list[ExportedRow]]:
    """The rows of each question; equal ids of different questions are those of other files."""
    groups: dict[Any, list[ExportedRow]] = {}
    for index, row in enumerate(rows):
        key = row.get("question_id"), need(row, "question", index)
        groups.setdefault(key, []).append(ExportedRow(index, row, read_tagged(row, index)))
    return list(groups.values())


def read_tagged(row: Mapping[str, Any], index: int) -> Transcript:
    transcript = read_transcript(row, where=f"row {index}")
    if transcript.protocol != "tags":
        raise DataError(
            f"row {index} has a transcript of the protocol {transcript.protocol!r}; the original's formats hold text "
            "with tags"
        )
    return transcript


def need(row: Mapping[str, Any], key: str, index: int) -> Any:
    return read_field(row, key, where=f"row {index}")


EXPORTS: dict[str, Callable[[Iterable[Mapping[str, Any]]], list[Row]]] = {
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
        rows = list(IMPORTS[target](load_records(path, source), source))
        check_not_empty(rows, path)
        check_finite(rows, path=f"{path} as {target}")  # rows of the file itself may have an infinite distance
        write_rows(out, rows)
        return Conversion(path=out, target=target, num_rows=len(rows), format_errors=count_format_errors(rows))
    if source in EXPORTED and target in EXPORTS:
        records = EXPORTS[target](load_jsonl(Path(path)))
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
    return dict(Counter(re.sub(r"\bstep \d+", "a step", each) for each in errors).most_common())
