"""What models say of prepared questions: how many tokens they take, and how often they are solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tunesmith.config import AlgorithmSection, DatasetSection, PassRateSection, PrepareSection, RunConfig, TokensSection
from tunesmith.errors import DataError
from tunesmith.judges.composite import numeric_judge
from tunesmith.model.load import load_tokenizer
from tunesmith.pipeline.data.conversations import ConversationReader
from tunesmith.pipeline.eval.pass_rates import measure_pass_rates
from tunesmith.pipeline.prepare.calculator_agent import calculator_agent
from tunesmith.pipeline.prepare.folder import format_lines, hash_json
from tunesmith.pipeline.prepare.rows import Candidate, Losses
from tunesmith.pipeline.prepare.trajectories import Style
from tunesmith.pipeline.session.policy import check_policy
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.storage import load_json_lines, save_text

UNBOUNDED = 2**62
SUFFIX = "_pass_rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """One conversation in tokens."""

    num_tokens: int
    num_trained: int
    """Tokens of the replies."""
    num_samples: int
    """Above 1 where the template renders a conversation's past differently, so that it is several sequences."""


def load_reader(section: TokensSection) -> ConversationReader:
    """The tokenizer that counts; no weights are read."""
    tokenizer = load_tokenizer(
        section.model, chat_template=section.chat_template, trust_remote_code=section.trust_remote_code
    )
    return ConversationReader(tokenizer)


def measure_length(reader: ConversationReader, row: Mapping[str, Any]) -> Length:
    """Read a row as fine-tuning reads it."""
    samples = reader.read([row], max_model_len=UNBOUNDED)
    return Length(
        num_tokens=max(len(sample.token_ids) for sample in samples),
        num_trained=sum(sum(sample.is_sampled) for sample in samples),
        num_samples=len(samples),
    )


def drop_long_rows(
    candidates: Sequence[Candidate], section: TokensSection, reader: ConversationReader, style: Style, losses: Losses
) -> tuple[list[Candidate], dict[str, Any]]:
    """The candidates that the model has room for, and the lengths of these."""
    kept, lengths = [], []
    for candidate in candidates:
        length = measure_length(reader, candidate.build_row(style))
        if section.max_model_len is not None and length.num_tokens > section.max_model_len:
            losses.add("too_long", candidate.index, f"{length.num_tokens} tokens")
        else:
            kept.append(candidate)
            lengths.append(length)
    return kept, describe_lengths(lengths, section)


def describe_lengths(lengths: Sequence[Length], section: TokensSection) -> dict[str, Any]:
    totals = sorted(length.num_tokens for length in lengths)
    report: dict[str, Any] = {"model": section.model, "max_model_len": section.max_model_len}
    if totals:
        report |= {
            "mean": round(fmean(totals), 1),
            "median": median(totals),
            "p95": totals[int(0.95 * (len(totals) - 1))],
            "max": totals[-1],
            "total": sum(totals),
            "trained": sum(length.num_trained for length in lengths),
            "num_split_conversations": sum(length.num_samples > 1 for length in lengths),
        }
    return report


def check_pass_rate_models(section: PassRateSection) -> None:
    """Raise for whatever is wrong with the models that are to be tried, reading no weights."""
    for model in section.models.values():
        check_policy(model)


def add_pass_rates(
    candidates: Sequence[Candidate], settings: PrepareSection, *, work: Path, losses: Losses
) -> tuple[list[Candidate], dict[str, Any]]:
    """The candidates with a column for each model; those of which no run was scored are left out."""
    section = settings.pass_rate
    assert section is not None
    report: dict[str, Any] = {"num_samples": section.num_samples}
    kept = list(candidates)
    for name in section.models:
        rates = measure_column(kept, name, settings, work=work)
        for candidate, rate in zip(kept, rates, strict=True):
            if rate is None:
                losses.add("no_scored_run", candidate.index, f"none of the runs of {name} was scored")
        kept = [
            replace(candidate, features={**candidate.features, name + SUFFIX: rate})
            for candidate, rate in zip(kept, rates, strict=True)
            if rate is not None
        ]
        if not kept:
            raise DataError(f"pass_rate.models.{name}: no run of any question was scored")
        report[name + SUFFIX] = {"mean": round(fmean(c.features[name + SUFFIX] for c in kept), 6)}
    return kept, report


def measure_column(
    candidates: Sequence[Candidate], name: str, settings: PrepareSection, *, work: Path
) -> list[float | None]:
    """The pass rate of each candidate by our own agent; a measurement that was killed goes on where it was."""
    section = settings.pass_rate
    assert section is not None
    rows = [
        {"place": place, "question": candidate.question, "answer": candidate.solution.answer}
        for place, candidate in enumerate(candidates)
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
            field=name + SUFFIX,
            num_runs=section.num_samples,
            out=out,
        )
    rates = {row["place"]: float(row[name + SUFFIX]) for row in load_json_lines(out)}
    return [rates.get(place) for place in range(len(candidates))]


def build_run_config(questions: Path, name: str, settings: PrepareSection) -> RunConfig:
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
