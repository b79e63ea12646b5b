"""Statistics of prepared rows that need a model: lengths in tokens (tokenizer only) and pass rates (weights)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tunesmith.commands.pass_rate import measure_pass_rates
from tunesmith.commands.prepare.calculator_agent import calculator_agent
from tunesmith.commands.prepare.rows import DroppedRows, RowCandidate, Style
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.config import AlgorithmSection, DatasetSection, PrepareSection, RunConfig, TokensSection
from tunesmith.errors import DataError
from tunesmith.judges.composite import numeric_judge
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.storage import load_json_lines, save_text

NO_LIMIT = 2**62
PASS_RATE_SUFFIX = "_pass_rate"


def hash_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON; names of files in existing work folders are made of it."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def format_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def drop_long_rows(
    candidates: Sequence[RowCandidate],
    section: TokensSection,
    reader: ConversationReader,
    style: Style,
    dropped: DroppedRows,
) -> tuple[list[RowCandidate], dict[str, Any]]:
    """Drop candidates longer than `max_model_len`, as fine-tuning tokenizes them; return the others and the report of
    their lengths. A conversation is split if its template renders earlier turns differently later on."""
    kept, lengths, num_trained, num_split = [], [], 0, 0
    for candidate in candidates:
        samples = reader.read([candidate.build_row(style)], max_model_len=NO_LIMIT)
        num_tokens = max(len(sample.token_ids) for sample in samples)
        if section.max_model_len is not None and num_tokens > section.max_model_len:
            dropped.add("too_long", candidate.index, f"{num_tokens} tokens")
            continue
        kept.append(candidate)
        lengths.append(num_tokens)
        num_trained += sum(sum(sample.is_sampled) for sample in samples)
        num_split += len(samples) > 1
    report: dict[str, Any] = {"model": section.model, "max_model_len": section.max_model_len}
    if lengths:
        lengths.sort()
        report |= {
            "mean": round(fmean(lengths), 1),
            "median": median(lengths),
            "p95": lengths[int(0.95 * (len(lengths) - 1))],
            "max": lengths[-1],
            "total": sum(lengths),
            "trained": num_trained,
            "num_split_conversations": num_split,
        }
    return kept, report


def add_pass_rates(
    candidates: Sequence[RowCandidate], settings: PrepareSection, *, work: Path, dropped: DroppedRows
) -> tuple[list[RowCandidate], dict[str, Any]]:
    """Add a pass-rate column per model; candidates without a scored rollout are dropped."""
    section = settings.pass_rate
    assert section is not None
    report: dict[str, Any] = {"num_samples": section.num_samples}
    kept = list(candidates)
    for name in section.models:
        rates = measure_model(kept, name, settings, work=work)
        for candidate, rate in zip(kept, rates, strict=True):
            if rate is None:
                dropped.add("no_scored_run", candidate.index, f"no rollout of {name} was scored")
        kept = [
            replace(candidate, features={**candidate.features, name + PASS_RATE_SUFFIX: rate})
            for candidate, rate in zip(kept, rates, strict=True)
            if rate is not None
        ]
        if not kept:
            raise DataError(f"pass_rate.models.{name}: no rollout of any question was scored")
        report[name + PASS_RATE_SUFFIX] = {"mean": round(fmean(c.features[name + PASS_RATE_SUFFIX] for c in kept), 6)}
    return kept, report


def measure_model(
    candidates: Sequence[RowCandidate], name: str, settings: PrepareSection, *, work: Path
) -> list[float | None]:
    """Pass rate of each candidate with the calculator agent; resumes a killed measurement from the work folder."""
    section = settings.pass_rate
    assert section is not None
    rows = [
        {"place": index, "question": candidate.question, "answer": candidate.solution.answer}
        for index, candidate in enumerate(candidates)
    ]
    model = section.models[name]
    key = hash_json(
        [rows, section.model_dump(mode="json", exclude={"models"}), model.model_dump(mode="json"), settings.seed]
    )
    questions, out = work / f"{name}-{key[:16]}.questions.jsonl", work / f"{name}-{key[:16]}.jsonl"
    if not out.is_file():
        save_text(questions, format_lines(rows))
        measure_pass_rates(
            build_run_config(questions, name, settings),
            workflow=calculator_agent,
            judge=numeric_judge,
            build_model=lambda endpoint, options: ChatModel(endpoint, options=options),
            field=name + PASS_RATE_SUFFIX,
            num_runs=section.num_samples,
            out=out,
        )
    rates = {row["place"]: float(row[name + PASS_RATE_SUFFIX]) for row in load_json_lines(out)}
    return [rates.get(index) for index in range(len(candidates))]


def build_run_config(questions: Path, name: str, settings: PrepareSection) -> RunConfig:
    """Run configuration for measuring pass rates of the model `name`."""
    section = settings.pass_rate
    assert section is not None
    return RunConfig(
        seed=settings.seed,
        num_cpu_threads=settings.num_cpu_threads,
        model=section.models[name],
        train_dataset=DatasetSection(path=str(questions)),
        algorithm=AlgorithmSection(batch_size=section.batch_size),
        engine=section.engine,
        rollout=section.rollout,
    )
