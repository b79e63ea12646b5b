"""The report of a pipeline: state, time, tokens, device and figures of each stage, as Markdown and JSON; and the result
of `run_pipeline`, with the state, model and figures of each stage.

The table of commands names what is reported on several stages of a kind together, such as the behavior of all models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.commands.eval.comparison import format_table
from tunesmith.commands.run.config import PlannedStage
from tunesmith.commands.run.folder import REPORT_JSON, REPORT_TABLE, DoneRecord, PipelineFolder, State
from tunesmith.commands.stage import RADAR, TABLES
from tunesmith.commands.table import STAGES, import_named
from tunesmith.monitor.console import format_duration
from tunesmith.monitor.metric_table import MetricTable
from tunesmith.runs.record import RunRecord
from tunesmith.runs.result import Result, load_for_inference, require_path
from tunesmith.storage import save_json, save_text

STATE_LABELS: Mapping[State, str] = {"done": "done", "begun": "unfinished", "changed": "outdated", "new": "not run"}


def save_report(folder: PipelineFolder, stages: Sequence[PlannedStage]) -> Path:
    """Write report.json and report.md from the records of the stages; returns the path of report.md."""
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
    path = folder.root / REPORT_TABLE
    save_text(path, format_report(folder, stages, done))
    return path


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
class StageOutcome(Result):
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

    def model(self, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the stage's model and its tokenizer; `options` are arguments of `from_pretrained`."""
        return load_for_inference(self.model_path, **options)

    def list_facts(self) -> dict[str, str]:
        facts = {"stage": f"{self.name} ({self.kind}), {STATE_LABELS[self.state]}", "folder": str(self.folder)}
        if self.model_folder is not None:
            facts["model"] = str(self.model_folder)
        return facts | {
            name: format_figure(value) for name, value in self.metrics.items() if name not in (RADAR, TABLES)
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PipelineResult(Result):
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

    def model(self, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the model of the last stage that has one; `options` are arguments of `from_pretrained`."""
        return load_for_inference(self.model_path, **options)

    def list_facts(self) -> dict[str, str]:
        facts = {"report": str(self.report)}
        for name, stage in self.stages.items():
            model = "" if stage.model_folder is None else f", {stage.model_folder}"
            facts[name] = f"{STATE_LABELS[stage.state]}{model}"
        return facts


def load_pipeline_result(root: Path, stages: Sequence[PlannedStage]) -> PipelineResult:
    """Read the records of the stages in a pipeline's folder."""
    folder = PipelineFolder(root)
    outcomes = {stage.name: load_outcome(folder, stage) for stage in stages}
    return PipelineResult(folder=root, report=root / REPORT_TABLE, stages=outcomes)


def load_outcome(folder: PipelineFolder, stage: PlannedStage) -> StageOutcome:
    state = folder.find_state(stage)
    done = folder.load_done(stage.name) if state == "done" else None
    return StageOutcome(
        name=stage.name,
        kind=stage.kind,
        state=state,
        folder=folder.output_folder(stage.name),
        model_folder=None if done is None or done.model is None else folder.root / done.model,
        metrics={} if done is None else done.figures,
    )
