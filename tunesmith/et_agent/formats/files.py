"""The files of ET-Agent's code: JSON arrays, JSON lines and Parquet, with one record class for each format.

Fields that a format has beyond the known ones are kept in `extra` and written back, so that reading and writing a file
gives an equal file. A missing or misaligned field is a DataError that names row and field.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from tunesmith.errors import ConfigError, DataError
from tunesmith.storage import open_atomic, storage_errors

Answer = str | int | float | Sequence[str] | None
"""One accepted answer or a list of them; numbers occur in the AIME test files."""


def list_answers(answer: Answer) -> list[str]:
    """The accepted answers as texts; empty if there is none."""
    if answer is None:
        return []
    return [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]


def take(values: dict[str, Any], key: str, where: str) -> Any:
    if key not in values:
        raise DataError(f"{where} has no {key!r}; its fields are {', '.join(values) or 'none'}")
    return values.pop(key)


def take_list(values: dict[str, Any], key: str, where: str) -> tuple[Any, ...]:
    found = take(values, key, where)
    if not isinstance(found, list | tuple):
        raise DataError(f"{where}: {key} must be a list, got {found!r:.80}")
    return tuple(found)


def check_aligned(lists: Mapping[str, Sequence[Any]], where: str) -> None:
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{where}: parallel lists differ in length: {lengths}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtQuestion:
    """A question of the source pool, or of a test set: `question` or `input`, `answer`, `source`."""

    question: str
    answer: Answer
    source: str | None = None
    question_key: str = "question"
    """The field that held the question."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, row: Mapping[str, Any], where: str) -> Self:
        values = dict(row)
        key = next((each for each in ("question", "input", "problem", "Question") if each in values), "question")
        question = take(values, key, where)
        answer = take(values, "answer", where)
        return cls(question=question, answer=answer, source=values.pop("source", None), question_key=key, extra=values)

    def write(self) -> dict[str, Any]:
        source = {} if self.source is None else {"source": self.source}
        return {self.question_key: self.question, "answer": self.answer, **source, **self.extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class EtTrajectory:
    """One entry of an evolve buffer."""

    text: str
    prediction: str | None
    is_correct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveRow:
    """A question with its evolve buffer, the output of the flywheel."""

    instruction: str
    """System prompt."""
    question: str
    answer: Answer
    source: str
    trajectories: tuple[EtTrajectory, ...]
    """Index 0 is the first rollout; empty after a timeout or an error."""
    judgements: tuple[Any, ...] = ()
    """Log of the judge; not aligned with the trajectories."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Among others `initial_output`, `prediction` and `initial_logs`."""

    @classmethod
    def read(cls, row: Mapping[str, Any], where: str) -> Self:
        values = dict(row)
        texts, predictions, verdicts = (
            take_list(values, key, where)
            for key in ("evolve_trajectories_buffer", "evolve_predictions", "evolve_trajectories_llm_judge_results")
        )
        check_aligned({"buffer": texts, "predictions": predictions, "judge results": verdicts}, where)
        entries = zip(texts, predictions, verdicts, strict=True)
        return cls(
            instruction=take(values, "instruction", where),
            question=take(values, "input", where),
            answer=take(values, "answer", where),
            source=take(values, "source", where),
            trajectories=tuple(EtTrajectory(text=t, prediction=p, is_correct=bool(v)) for t, p, v in entries),
            judgements=tuple(values.pop("evolve_judgements", ())),
            extra=values,
        )

    def write(self) -> dict[str, Any]:
        return {
            "instruction": self.instruction,
            "input": self.question,
            "answer": self.answer,
            "source": self.source,
            "initial_output": "",
            "prediction": "",
            "initial_logs": [],
            **self.extra,
            "evolve_trajectories_buffer": [each.text for each in self.trajectories],
            "evolve_predictions": [each.prediction for each in self.trajectories],
            "evolve_trajectories_llm_judge_results": [each.is_correct for each in self.trajectories],
            "evolve_judgements": list(self.judgements),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpacaRow:
    """A row of fine-tuning data in LLaMA-Factory's alpaca format."""

    instruction: str
    question: str
    output: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, row: Mapping[str, Any], where: str) -> Self:
        values = dict(row)
        return cls(
            instruction=take(values, "instruction", where),
            question=take(values, "input", where),
            output=take(values, "output", where),
            extra=values,
        )

    def write(self) -> dict[str, Any]:
        return {"instruction": self.instruction, "input": self.question, "output": self.output, **self.extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One of the K rollouts of a question."""

    text: str
    prediction: str | None
    tool_counts: Mapping[str, int]
    """`search_times`, `python_times` and `total_times`."""
    correctness: float | None
    """None before scoring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A question with K rollouts, before or after scoring; after Pareto sampling, `pareto` has its numbers."""

    instruction: str
    question: str
    answer: Answer
    source: str
    rollouts: tuple[Rollout, ...]
    pareto: Mapping[str, float] | None = None
    """`score_tool`, `score_corr`, `rank` and `distance`."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, row: Mapping[str, Any], where: str) -> Self:
        values = dict(row)
        names = ("rollout_outputs", "predictions", "tool_counts")
        lists = {name: take_list(values, name, where) for name in names}
        scores = take_list(values, "correctness", where) if values.get("correctness") is not None else None
        values.pop("correctness", None)
        check_aligned(lists | ({} if scores is None else {"correctness": scores}), where)
        entries = zip(*lists.values(), scores or [None] * len(lists["predictions"]), strict=True)
        given = [key for key in PARETO_KEYS if key in values]
        if given and len(given) < len(PARETO_KEYS):
            missing = next(key for key in PARETO_KEYS if key not in given)
            raise DataError(f"{where} has {given[0]!r}, but no {missing!r}")
        return cls(
            instruction=take(values, "instruction", where),
            question=take(values, "input", where),
            answer=take(values, "answer", where),
            source=take(values, "source", where),
            rollouts=tuple(Rollout(text=t, prediction=p, tool_counts=n, correctness=c) for t, p, n, c in entries),
            pareto={key: values.pop(key) for key in given} or None,
            extra=values,
        )

    def write(self) -> dict[str, Any]:
        scores = [each.correctness for each in self.rollouts]
        is_scored = bool(scores) and None not in scores
        return {
            "instruction": self.instruction,
            "input": self.question,
            "answer": self.answer,
            "source": self.source,
            **self.extra,
            "rollout_outputs": [each.text for each in self.rollouts],
            "predictions": [each.prediction for each in self.rollouts],
            "tool_counts": [dict(each.tool_counts) for each in self.rollouts],
            **({"correctness": scores} if is_scored else {}),
            **(self.pareto or {}),
        }


PARETO_KEYS = ("score_tool", "score_corr", "rank", "distance")


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRow:
    """A row of the parquet file that reinforcement learning reads."""

    system: str
    question: str
    answers: tuple[str, ...]
    is_math: bool
    index: int
    """The key of the reward's groups: unique in the file."""
    split: str = "train"
    data_source: str | None = None
    """None is that of the original for the ability."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, row: Mapping[str, Any], where: str) -> Self:
        values = dict(row)
        prompt = {each["role"]: each["content"] for each in take_list(values, "prompt", where)}
        truth, info = take(values, "reward_model", where), dict(take(values, "extra_info", where))
        question = info.pop("question", None) or prompt.get("user")
        if question is None:
            raise DataError(f"{where} has neither extra_info.question nor a user message in prompt")
        ability = take(values, "ability", where)
        values.pop("metadata", None)
        return cls(
            system=prompt.get("system", ""),
            question=question,
            answers=tuple(list_answers(truth["ground_truth"])),
            is_math=ability == "math",
            index=int(take(info, "index", where)),
            split=info.pop("split", "train"),
            data_source=values.pop("data_source", None),
            extra=values,
        )

    def write(self) -> dict[str, Any]:
        name = "math" if self.is_math else "qa"
        system = [{"content": self.system, "role": "system"}] if self.system else []
        return {
            "data_source": self.data_source or f"{name}_effi_rl",
            "prompt": [*system, {"content": self.question, "role": "user"}],
            "ability": name,
            "reward_model": {"ground_truth": list(self.answers), "style": "rule"},
            "extra_info": {
                "index": self.index,
                "need_tools_kwargs": False,
                "question": self.question,
                "split": self.split,
            },
            "metadata": None,
            **self.extra,
        }


Record: TypeAlias = EtQuestion | EvolveRow | AlpacaRow | RolloutRow | RlRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A file format of the original."""

    record: type[Record]
    container: Literal["array", "lines", "parquet"]
    description: str


FORMATS: dict[str, Format] = {
    "et_pool": Format(record=EtQuestion, container="array", description="source pool: question, answer, source"),
    "et_evolve": Format(record=EvolveRow, container="array", description="evolve buffers of the flywheel"),
    "et_rft": Format(record=AlpacaRow, container="array", description="fine-tuning rows in alpaca format"),
    "et_rollouts": Format(record=RolloutRow, container="array", description="rollouts, with or without scores"),
    "et_pareto": Format(record=RolloutRow, container="array", description="rollouts with Pareto ranks"),
    "et_rl": Format(record=RlRow, container="parquet", description="training rows of reinforcement learning"),
    "et_test": Format(record=EtQuestion, container="lines", description="test.jsonl of an evaluation set"),
}
RL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.list_(pa.string())), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("need_tools_kwargs", pa.bool_()),
                    ("question", pa.string()),
                    ("split", pa.string()),
                ]
            ),
        ),
        ("metadata", pa.null()),
    ]
)
"""Schema of the parquet file of the original."""


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}: the formats of ET-Agent are {', '.join(FORMATS)}")
    return FORMATS[name]


def load_records(path: Path | str, name: str) -> list[Record]:
    """The records of a file in the format of that name; DataError names the first malformed row."""
    form, file = find_format(name), Path(path).expanduser()
    with storage_errors(file, "read"):
        data = file.read_bytes()
    rows = _read_rows(data, form.container, file)
    records: list[Record] = []
    for index, row in enumerate(rows):
        where = f"row {index} of {str(file)!r}"
        if not isinstance(row, dict):
            raise DataError(f"{where} must be a JSON object, got {type(row).__name__}")
        records.append(form.record.read(row, where))
    return records


def _read_rows(data: bytes, container: str, file: Path) -> list[Any]:
    try:
        if container == "parquet":
            return list(pq.read_table(io.BytesIO(data)).to_pylist())
        if container == "lines":
            return [json.loads(line) for line in data.splitlines() if line.strip()]
        rows = json.loads(data)
    except (ValueError, pa.ArrowException) as error:
        what = "Parquet file" if container == "parquet" else "JSON file"
        raise DataError(f"{str(file)!r} is not a {what}: {str(error)[:200]}") from error
    if not isinstance(rows, list):
        raise DataError(f"{str(file)!r} must hold a JSON array of objects, got {type(rows).__name__}")
    return rows


def save_records(path: Path | str, records: Sequence[Record], name: str) -> None:
    form, file = find_format(name), Path(path).expanduser()
    wrong = next((each for each in records if not isinstance(each, form.record)), None)
    if wrong is not None:
        raise ConfigError(f"the format {name!r} holds {form.record.__name__}, not {type(wrong).__name__}")
    rows = [record.write() for record in records]
    with storage_errors(file, "write"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(file) as opened:
            if form.container == "parquet":
                has_extra = any(record.extra for record in records)
                schema = pa.Table.from_pylist(rows).schema if has_extra else RL_SCHEMA
                pq.write_table(pa.Table.from_pylist(rows, schema=schema), opened)
            elif form.container == "lines":
                opened.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
            else:
                opened.write(json.dumps(rows, ensure_ascii=False, indent=2).encode())
