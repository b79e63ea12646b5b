"""The folder of a pipeline and the records of its stages.

    pipeline.yaml                 the settings     report.md  report.json  radar.png  the report
    NAME/                         output of stage NAME; for sft, prefer and rl its run folder
    stages/NAME/START.json        settings and inputs of the current run of the stage, and the seconds of each attempt
    stages/NAME/DONE.json         results and figures of a complete stage; written last

A stage is done if its DONE.json has the digest of the current settings and the current mark of each input stage. The
mark is a random id, new each time a stage runs, so a stage whose inputs were rebuilt is rebuilt too.

The report has the state, time, tokens, device and figures of each stage. The table of commands names what is reported
on several stages of a kind together, such as the behavior of all models.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from tunesmith.commands.eval.comparison import format_table
from tunesmith.commands.run.config import PlannedStage
from tunesmith.commands.stage import RADAR, TABLES, StageResult
from tunesmith.commands.table import STAGES, import_named
from tunesmith.errors import StorageError
from tunesmith.monitor.console import format_duration
from tunesmith.monitor.metric_table import MetricTable
from tunesmith.runs.record import RunRecord
from tunesmith.runs.result import ModelResult, require_path
from tunesmith.runs.workspace import find_changes, is_mutable_key, name_aside
from tunesmith.storage import DONE, check_complete, load_json, remove_tree, save_json, save_text, storage_errors

CONFIG_FILE, REPORT_TABLE, REPORT_JSON = "pipeline.yaml", "report.md", "report.json"
STATES = "stages"
START = "START.json"

State = Literal["done", "begun", "changed", "new"]
"""State of a stage before it runs. `done`: complete with these settings and inputs; `begun`: unfinished with these
settings and inputs, can be resumed; `changed`: has output of other settings or inputs; `new`: never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """START.json: settings and inputs of a started stage. The field names are its keys."""

    digest: str
    values: Mapping[str, Any]
    made_from: Mapping[str, str]
    """Marks of the input stages."""
    attempts: Sequence[float | None]
    """Seconds of each attempt; None for one that was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneRecord:
    """DONE.json: results of a complete stage. The field names are its keys."""

    digest: str
    mark: str
    made_from: Mapping[str, str]
    ended: str
    """Local date and time."""
    seconds: float
    """Total time of all attempts that were not killed."""
    num_attempts: int
    num_killed: int
    """Attempts that were killed, whose time is unknown."""
    model: str | None
    """The model that `stage:NAME` refers to, relative to the pipeline's folder."""
    tokens: int | None
    """Sampled tokens, or trained tokens for fine-tuning; None if the stage did neither."""
    device: str | None
    """Device of the stage's model."""
    figures: Mapping[str, Any]


Record = TypeVar("Record", StartRecord, DoneRecord)


def load_record(kind: type[Record], path: Path) -> Record | None:
    try:
        return kind(**load_json(path)) if path.exists() else None
    except TypeError as error:
        raise StorageError(
            f"{path} is damaged or of another version ({error}): remove it to check the stage again"
        ) from error


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """Files and stage records of one pipeline."""

    root: Path

    def load_start(self, name: str) -> StartRecord | None:
        return load_record(StartRecord, self.root / STATES / name / START)

    def load_done(self, name: str) -> DoneRecord | None:
        return load_record(DoneRecord, self.root / STATES / name / DONE)

    def check_output(self, stage: PlannedStage) -> None:
        """Raise StorageError if output of a completed stage is missing or damaged."""
        done, output = self.load_done(stage.name), self.root / stage.name
        assert done is not None
        try:
            match STAGES[stage.kind].output:
                case "model":
                    check_complete(self.root / str(done.model))
                case "folder":
                    check_complete(output)
                case str(file):
                    load_json(output / file)
            if not output.exists():
                raise StorageError(f"{output} is missing")
        except StorageError as error:
            raise StorageError(
                f"stage {stage.name!r} is done, but its output is incomplete: {error}; restore it, or run the stage "
                f"again with --only {stage.name} --again"
            ) from error

    def find_state(self, stage: PlannedStage) -> State:
        """State of the stage before it runs."""
        start, done = self.load_start(stage.name), self.load_done(stage.name)
        made_from = self.find_marks(stage)
        if done is not None and (done.digest, done.made_from) == (stage.digest, made_from):
            return "done"
        if start is None:
            return "new"
        return "begun" if start.made_from == made_from and is_same_stage(start, stage) else "changed"

    def find_marks(self, stage: PlannedStage) -> dict[str, str | None]:
        """Current marks of the input stages; None for one that is not done."""
        done = {name: self.load_done(name) for name in stage.needs}
        return {name: None if each is None else each.mark for name, each in done.items()}

    def begin(self, stage: PlannedStage) -> None:
        """Record a new attempt, with unknown duration, and remove an earlier DONE.json."""
        state = self.root / STATES / stage.name
        old = self.load_start(stage.name)
        made_from = {name: mark for name, mark in self.find_marks(stage).items() if mark is not None}
        assert made_from.keys() == set(stage.needs), "all input stages are done"
        attempts = [] if old is None else list(old.attempts)
        start = StartRecord(digest=stage.digest, values=stage.values, made_from=made_from, attempts=[*attempts, None])
        with storage_errors(state, "write"):
            (state / DONE).unlink(missing_ok=True)
        save_json(state / START, asdict(start))

    def end_attempt(self, name: str, seconds: float) -> None:
        """Record the duration of the last attempt, whether it succeeded or failed."""
        start = self.load_start(name)
        assert start is not None
        save_json(self.root / STATES / name / START, asdict(replace(start, attempts=[*start.attempts[:-1], seconds])))

    def finish(self, stage: PlannedStage, result: StageResult) -> None:
        """Write DONE.json."""
        start = self.load_start(stage.name)
        assert start is not None
        known = [seconds for seconds in start.attempts if seconds is not None]
        done = DoneRecord(
            digest=stage.digest,
            mark=secrets.token_hex(8),
            made_from=start.made_from,
            ended=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            seconds=sum(known),
            num_attempts=len(start.attempts),
            num_killed=len(start.attempts) - len(known),
            model=None if result.model is None else str(result.model.relative_to(self.root)),
            tokens=result.tokens,
            device=result.device,
            figures=result.figures,
        )
        save_json(self.root / STATES / stage.name / DONE, asdict(done))

    def set_aside(self, name: str) -> Path | None:
        """Rename the stage's output and remove its records; returns the new path, None if there was no output."""
        state, output, aside = self.root / STATES / name, self.root / name, None
        if output.exists():
            aside = name_aside(self.root / f"{name}.old-")
            with storage_errors(output, "rename"):
                output.rename(aside)
        if state.exists():
            remove_tree(state)
        return aside


def is_same_stage(start: StartRecord, stage: PlannedStage) -> bool:
    """Whether an unfinished stage can be resumed: equal settings, or changes only in keys that may change in a run."""
    if start.digest == stage.digest:
        return True
    keys = STAGES[stage.kind].mutable_keys
    if keys is None:
        return False
    mutable_keys = import_named(keys)
    return all(is_mutable_key(key, mutable_keys) for key in find_changes(start.values, stage.values))


STATE_LABELS: Mapping[State, str] = {"done": "done", "begun": "unfinished", "changed": "outdated", "new": "not run"}


def save_report(folder: PipelineFolder, stages: Sequence[PlannedStage]) -> None:
    """Write report.json and report.md from the records of the stages."""
    done = {stage.name: folder.load_done(stage.name) for stage in stages}
    records = [
        {
            "name": stage.name,
            "kind": stage.kind,
            "state": folder.find_state(stage),
            "settings": stage.values,
            "done": None if (each := done[stage.name]) is None else asdict(each),
        }
        for stage in stages
    ]
    save_json(folder.root / REPORT_JSON, {"pipeline": folder.root.name, "stages": records})
    save_text(folder.root / REPORT_TABLE, format_report(folder, stages, done))


def format_report(folder: PipelineFolder, stages: Sequence[PlannedStage], done: Mapping[str, DoneRecord | None]) -> str:
    header = ["stage", "kind", "state", "time", "tokens", "device"]
    rows = [
        [stage.name, stage.kind, STATE_LABELS[folder.find_state(stage)], *format_costs(done[stage.name])]
        for stage in stages
    ]
    parts = [f"# {folder.root.name}", "", format_table(header, rows)]
    for stage in stages:
        each = done[stage.name]
        if each is not None:
            parts += ["", f"## {stage.name}", "", *format_stage(each)]
    for entry in STAGES.values():
        if entry.report is not None:
            kept = {each.name: done[each.name] for each in stages if each.kind == entry.kind}
            figures = {name: each.figures for name, each in kept.items() if each is not None}
            parts += import_named(entry.report)(folder.root, figures)
    return "\n".join(parts) + "\n"


def format_costs(done: DoneRecord | None) -> list[str]:
    """Columns time, tokens and device."""
    if done is None:
        return ["-", "-", "-"]
    time = format_duration(done.seconds)
    if done.num_attempts > 1:
        killed = f"; the time of {done.num_killed} killed is not included" if done.num_killed else ""
        time += f" in {done.num_attempts} attempts{killed}"
    return [time, "-" if done.tokens is None else f"{done.tokens:,}", done.device or "-"]


def format_stage(done: DoneRecord) -> list[str]:
    lines = [
        f"- {name}: {format_figure(figure)}" for name, figure in done.figures.items() if name not in (RADAR, TABLES)
    ]
    if done.model is not None:
        lines.append(f"- model: `{done.model}`")
    lines.append(f"- ended: {done.ended}")
    if TABLES in done.figures:
        lines += ["", done.figures[TABLES].rstrip()]
    return lines


def format_figure(figure: Any) -> str:
    if isinstance(figure, float):
        return f"{figure:.5g}"
    return figure if isinstance(figure, str) else json.dumps(figure, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageOutcome(ModelResult):
    """One stage of a pipeline after a call of `run_pipeline`."""

    name: str
    kind: str
    state: State
    folder: Path
    """The stage's output."""
    model_folder: Path | None
    """Its model; None if the stage has none or is not done."""
    metrics: Mapping[str, Any]
    """The figures of the report, by label; empty unless the stage is done."""

    @property
    def model_path(self) -> str:
        """Path of the stage's model; ModelError if it has none."""
        return require_path(self.model_folder)

    @property
    def history(self) -> MetricTable:
        """The metrics of every step of a training stage; empty for other kinds."""
        return RunRecord(self.folder).metrics.to_table()

    def list_facts(self) -> dict[str, str]:
        facts = {"stage": f"{self.name} ({self.kind}), {STATE_LABELS[self.state]}", "folder": str(self.folder)}
        if self.model_folder is not None:
            facts["model"] = str(self.model_folder)
        return facts | {
            name: format_figure(value) for name, value in self.metrics.items() if name not in (RADAR, TABLES)
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PipelineResult(ModelResult):
    """Result of a pipeline."""

    folder: Path
    report: Path
    """The report as Markdown."""
    stages: Mapping[str, StageOutcome]
    """By name, in order."""

    @property
    def model_path(self) -> str:
        """Path of the model of the last stage that has one."""
        found = [stage.model_folder for stage in self.stages.values() if stage.model_folder is not None]
        return require_path(found[-1] if found else None)

    def list_facts(self) -> dict[str, str]:
        facts = {"report": str(self.report)}
        for name, stage in self.stages.items():
            model = "" if stage.model_folder is None else f", {stage.model_folder}"
            facts[name] = f"{STATE_LABELS[stage.state]}{model}"
        return facts


def load_outcome(folder: PipelineFolder, stage: PlannedStage) -> StageOutcome:
    """Read the record of a stage in a pipeline's folder."""
    state = folder.find_state(stage)
    done = folder.load_done(stage.name) if state == "done" else None
    return StageOutcome(
        name=stage.name,
        kind=stage.kind,
        state=state,
        folder=folder.root / stage.name,
        model_folder=None if done is None or done.model is None else folder.root / done.model,
        metrics={} if done is None else done.figures,
    )
