"""`tunesmith prepare`: converts questions with worked solutions into conversations of the calculator agent.

    train.jsonl   one conversation per line: question, answer, solution, num_steps, messages, tools, pass rates
    eval.jsonl    held-out questions with a readable answer     report.json  rows kept and dropped, by reason
    DONE.json     settings and file sizes, written last

Steps: read, verify with the calculator, remove contamination, paraphrase, measure lengths and pass rates, write.
Lengths need a tokenizer only, pass rates the weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tunesmith.arguments import read_api_key
from tunesmith.commands.pass_rate import measure_pass_rates
from tunesmith.commands.prepare.calculator_agent import calculator_agent
from tunesmith.commands.prepare.rows import (
    DroppedRows,
    RowCandidate,
    Style,
    add_paraphrases,
    check_contamination,
    check_evaluation_row,
    check_training_row,
    compute_format_report,
    read_rows,
)
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.commands.stage import ChooseModel, StageResult, check_rows
from tunesmith.config import AlgorithmSection, DatasetSection, PrepareSection, RunConfig, SourceSection, TokensSection
from tunesmith.config.prepare import PassRateSection
from tunesmith.errors import DataError, errors_of
from tunesmith.judges.composite import numeric_judge
from tunesmith.model.load import check_section, load_tokenizer
from tunesmith.model.source.fingerprint import describe_weights
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.runs.result import Result
from tunesmith.runs.workspace import Workspace, check_same
from tunesmith.storage import load_json, load_json_lines, new_folder, remove_tree, save_json, storage_errors
from tunesmith.tasks.data_path import FORMATS
from tunesmith.tasks.load import check_required_fields, load_rows, write_rows

NO_LIMIT = 2**62
PASS_RATE_SUFFIX = "_pass_rate"


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
    candidates: Sequence[RowCandidate],
    section: PassRateSection,
    settings: PrepareSection,
    *,
    work: Path,
    dropped: DroppedRows,
) -> tuple[list[RowCandidate], dict[str, Any]]:
    """Add a pass-rate column per model; candidates without a scored rollout are dropped."""
    report: dict[str, Any] = {"num_samples": section.num_samples}
    kept = list(candidates)
    for name in section.models:
        rates = measure_model(kept, name, section, settings, work=work)
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
    candidates: Sequence[RowCandidate], name: str, section: PassRateSection, settings: PrepareSection, *, work: Path
) -> list[float | None]:
    """Pass rate of each candidate with the calculator agent; resumes a killed measurement from the work folder."""
    rows = [
        {"place": index, "question": candidate.question, "answer": candidate.solution.answer}
        for index, candidate in enumerate(candidates)
    ]
    model = section.models[name]
    inputs = [rows, section.model_dump(mode="json", exclude={"models"}), model.model_dump(mode="json"), settings.seed]
    text = json.dumps(inputs, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    stem = f"{name}-{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:16]}"
    questions, out = work / f"{stem}.questions.jsonl", work / f"{stem}.jsonl"
    weights, record = {"weights": describe_weights(model.path)}, work / f"{stem}.weights.json"
    if record.is_file():  # a model that was trained again has the same name
        check_same(out, load_json(record), weights)
    else:
        save_json(record, weights)
    if not out.is_file():
        write_rows(questions, rows)
        config = RunConfig(
            seed=settings.seed,
            num_cpu_threads=settings.num_cpu_threads,
            model=model,
            train_dataset=DatasetSection(path=str(questions)),
            algorithm=AlgorithmSection(batch_size=section.batch_size),
            engine=section.engine,
            rollout=section.rollout,
        )
        measure_pass_rates(
            config,
            workflow=calculator_agent,
            judge=numeric_judge,
            build_model=ChatModel,
            field=name + PASS_RATE_SUFFIX,
            num_runs=section.num_samples,
            out=out,
        )
    rates = {row["place"]: float(row[name + PASS_RATE_SUFFIX]) for row in load_json_lines(out)}
    return [rates.get(index) for index in range(len(candidates))]


TRAIN, EVALUATION, REPORT, PARAPHRASES = "train.jsonl", "eval.jsonl", "report.json", "paraphrases.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrepareResult(Result):
    """Result of a preparation."""

    folder: Path
    num_train: int
    """Rows of train.jsonl."""
    num_eval: int
    """Rows of eval.jsonl, 0 without an evaluation set."""
    content: Mapping[str, Any]
    """The content of report.json."""

    @property
    def train_path(self) -> Path:
        return self.folder / TRAIN

    @property
    def eval_path(self) -> Path | None:
        """None without an evaluation set."""
        return self.folder / EVALUATION if self.content["eval"] is not None else None

    def list_facts(self) -> dict[str, str]:
        content = self.content
        facts = {"folder": str(self.folder), "train": describe_counts(content["train"])}
        if self.eval_path is not None:
            facts["eval"] = describe_counts(content["eval"])
        if (found := content["contamination"]) is not None:
            counts = f"{found['num_exact']} exact, {found['num_ngram']} by n-gram"
            facts["contamination"] = f"{counts} (action: {found['action']})"
        form, optional = content["format"], ("paraphrase", "tokens", "pass_rate")
        facts["format"] = f"{form['num_valid']} of {form['num_rows']} rows valid, means {form['means']}"
        return facts | {name: str(content[name]) for name in optional if content[name] is not None}


def run_prepare(settings: PrepareSection, *, out_dir: Path) -> PrepareResult:
    """Write the prepared rows to the new folder `out_dir`; return the report of one that already holds them.

    Raises ConfigError, DataError or ModelError for invalid input before any weights load, ConfigError if the folder was
    prepared with other settings or from other rows, and StorageError if it holds other files or cannot be written.
    """
    folder = Path(out_dir).expanduser().absolute()
    workspace = Workspace(folder, is_whole=True)
    models = {} if settings.pass_rate is None else settings.pass_rate.models
    sources = {"data": settings.data, "eval_data": settings.eval_data}
    inputs = {
        # all but those that change only the speed
        "settings": settings.model_dump(
            mode="json", exclude={"num_cpu_threads": True, "paraphrase": {"max_concurrency"}}
        ),
        # None for a data set that is not a local path
        "sources": {knob: hash_files(Path(each.path).expanduser()) for knob, each in sources.items() if each},
        "weights": {name: describe_weights(model.path) for name, model in models.items()},
    }
    if workspace.find_result(inputs) is None:
        reader = check_settings(settings)
        with workspace:
            prepare_folder(settings, workspace, inputs, reader)
    content = load_json(folder / REPORT)
    evaluation = content["eval"]
    return PrepareResult(
        folder=folder,
        num_train=content["train"]["num_kept"],
        num_eval=0 if evaluation is None else evaluation["num_kept"],
        content=content,
    )


def hash_files(path: Path) -> str | None:
    """SHA-256 of a data file, or of all data files in a folder with their names; None if `path` does not exist."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in FORMATS)
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path)}\n{file.stat().st_size}\n".encode())
        with storage_errors(file, "read"), file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def prepare_folder(
    settings: PrepareSection, workspace: Workspace, inputs: Mapping[str, Any], reader: ConversationReader | None
) -> None:
    """Prepare all rows and write the folder. Until it is there, expensive results (rewritten questions, pass rates) are
    kept in `<name>.work` beside it."""
    rows = load_source(settings.data, settings, default_split="train", knob="data")
    held_out = None
    if settings.eval_data is not None:
        held_out = load_source(settings.eval_data, settings, default_split="test", knob="eval_data")
    work = workspace.root.with_name(f"{workspace.root.name}.work")
    with storage_errors(work, "write"):
        work.mkdir(exist_ok=True)
    dropped, eval_dropped = DroppedRows(), DroppedRows()
    evaluation = None if held_out is None else read_rows(held_out, settings, eval_dropped, check_evaluation_row)
    candidates = read_rows(rows, settings, dropped, partial(check_training_row, style=settings.style))
    # one section of the report for each step, None for a step that is off; paraphrases are checked as their sources are
    report: dict[str, Any] = {"contamination": None, "paraphrase": None, "tokens": None, "pass_rate": None}
    questions, overlaps = [candidate.question for candidate in evaluation or ()], list[dict[str, Any]]()
    if evaluation is not None:
        candidates, overlaps = check_contamination(candidates, questions, settings.contamination, dropped)
    if settings.paraphrase is not None:
        paraphrases = str(work / PARAPHRASES)
        added, report["paraphrase"] = add_paraphrases(candidates, settings.paraphrase, cache_path=paraphrases)
        if evaluation is not None:
            added, more = check_contamination(added, questions, settings.contamination, dropped)
            overlaps += more
        candidates = sorted([*candidates, *added], key=lambda each: (each.index, each.paraphrase is not None))
    if evaluation is not None:
        report["contamination"] = describe_overlaps(overlaps, settings)
    if reader is not None and settings.tokens is not None:
        candidates, report["tokens"] = drop_long_rows(candidates, settings.tokens, reader, settings.style, dropped)
    if settings.pass_rate is not None and candidates:
        candidates, report["pass_rate"] = add_pass_rates(
            candidates, settings.pass_rate, settings, work=work, dropped=dropped
        )
    if not candidates:
        raise DataError(f"no row of {settings.data.path!r} remains; dropped: {dropped.counts}")
    train = [candidate.build_row(settings.style) for candidate in candidates]
    content = {
        "train": {"num_rows": len(rows), "num_kept": len(train), **dropped.to_json()},
        "eval": describe_evaluation(evaluation, len(held_out or []), eval_dropped),
        "style": settings.style,
        "format": compute_format_report(train),
        "num_steps": dict(sorted(Counter(str(row["num_steps"]) for row in train).items())),
        **report,
    }
    with new_folder(workspace.root, inputs) as temporary:
        write_rows(temporary / TRAIN, train)
        if evaluation is not None:
            write_rows(temporary / EVALUATION, (each.build_row(settings.style) for each in evaluation))
        if (work / PARAPHRASES).is_file():
            shutil.copyfile(work / PARAPHRASES, temporary / PARAPHRASES)
        save_json(temporary / REPORT, content)
    remove_tree(work)


def check_settings(settings: PrepareSection) -> ConversationReader | None:
    """Validate models and API keys before data is read; returns the reader that measures lengths."""
    paraphrase, tokens = settings.paraphrase, settings.tokens
    if paraphrase is not None:
        read_api_key(paraphrase.api_key_env, knob="paraphrase.api_key_env")
    for model in () if settings.pass_rate is None else settings.pass_rate.models.values():
        check_section(model)
    if tokens is None:
        return None
    return ConversationReader(
        load_tokenizer(tokens.model, chat_template=tokens.chat_template, trust_remote_code=tokens.trust_remote_code)
    )


def load_source(
    section: SourceSection, settings: PrepareSection, *, default_split: str, knob: str
) -> list[dict[str, Any]]:
    """All rows, or the first `max_rows`; raises DataError for a row without question or solution."""
    split = choose_split(section, default_split)
    hint = "set question_field and answer_field to the fields that hold the question and the worked solution"
    with errors_of(knob):
        rows = load_rows(section.path, name=section.name, split=split, num_rows=settings.max_rows)
        check_required_fields(rows, (settings.question_field, settings.answer_field), path=section.path, advice=hint)
    return rows


def choose_split(section: SourceSection, default: str) -> str | None:
    """The split that is read: all of a file, if the section names none."""
    return section.split or (None if Path(section.path).expanduser().is_file() else default)


def describe_evaluation(
    evaluation: Sequence[RowCandidate] | None, num_rows: int, dropped: DroppedRows
) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    num_unverified = sum(not candidate.is_verified for candidate in evaluation)
    return {"num_rows": num_rows, "num_kept": len(evaluation), "num_unverified": num_unverified, **dropped.to_json()}


def describe_overlaps(overlaps: Sequence[Mapping[str, Any]], settings: PrepareSection) -> dict[str, Any]:
    counts = Counter(overlap["kind"] for overlap in overlaps)
    return {
        "action": settings.contamination.action,
        "ngram_words": settings.contamination.ngram_words,
        "num_exact": counts["exact"],
        "num_ngram": counts["ngram"],
        "overlaps": list(overlaps),
    }


def describe_counts(counts: Mapping[str, Any]) -> str:
    dropped = ", ".join(f"{reason} {count}" for reason, count in counts["dropped"].items()) or "none"
    return f"{counts['num_kept']} rows of {counts['num_rows']}; dropped: {dropped}"


def check_stage(settings: PrepareSection) -> None:
    for section, default_split in ((settings.data, "train"), (settings.eval_data, "test")):
        if section is not None:
            check_rows(section.path, name=section.name, split=choose_split(section, default_split))


def run_stage(settings: PrepareSection, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    report = run_prepare(settings, out_dir=out_dir)
    dropped = {f"dropped: {reason}": count for reason, count in report.content["train"].get("dropped", {}).items()}
    return StageResult(figures={"training rows": report.num_train, "held-out rows": report.num_eval} | dropped)
