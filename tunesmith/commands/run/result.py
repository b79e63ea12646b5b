"""The result of `run_pipeline`: the report, and the state, model and figures of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.commands.run.commands import RADAR, TABLES
from tunesmith.commands.run.folder import REPORT_TABLE, PipelineFolder, State
from tunesmith.commands.run.plan import PlannedStage
from tunesmith.commands.run.report import STATE_LABELS, format_figure
from tunesmith.monitor.metric_table import MetricTable
from tunesmith.runs.record import RunRecord
from tunesmith.runs.result import Result, load_for_inference, require_path


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
