"""The report of a pipeline: state, time, tokens, device and figures of each stage, as Markdown and JSON.

The table of commands names what is reported on several stages of a kind together, such as the behavior of all models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunesmith.commands.eval.comparison_table import format_table
from tunesmith.commands.run.folder import (
    REPORT_JSON,
    REPORT_TABLE,
    DoneRecord,
    PipelineFolder,
    State,
)
from tunesmith.commands.run.plan import PlannedStage
from tunesmith.commands.stage import RADAR, TABLES
from tunesmith.commands.table import STAGES, import_named
from tunesmith.monitor.console import format_duration
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
