"""The report of a pipeline: state, time, tokens, device and figures of each stage, as Markdown and JSON.

Evaluations that measure behavior are merged into one table and, with matplotlib installed, one radar chart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunesmith.commands.eval.comparison_table import format_table
from tunesmith.commands.eval.radar import Radar, format_radar, merge_radars
from tunesmith.commands.eval.radar_plot import can_plot, save_radar_plot
from tunesmith.commands.run.commands import RADAR, TABLES
from tunesmith.commands.run.folder import (
    RADAR_PLOT,
    REPORT_JSON,
    REPORT_TABLE,
    DoneRecord,
    PipelineFolder,
    State,
)
from tunesmith.commands.run.plan import PlannedStage
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
    radars = {name: each.figures[RADAR] for name, each in done.items() if each is not None and RADAR in each.figures}
    if radars:
        parts += ["", *format_behavior(folder.root / RADAR_PLOT, merge_radars(radars))]
    return "\n".join(parts) + "\n"


def format_behavior(plot: Path, radar: Radar) -> list[str]:
    """The section on the behavior of all evaluated models; draws the chart if matplotlib is installed."""
    about = (
        "Accuracy; correctness per tool call (efficiency); share of trajectories without redundancy (conciseness); "
        "correctness per failed call (successful execution); correctness per 1000 sampled tokens (reasoning length)."
    )
    chart = []
    if not can_plot():
        chart = ["", f"({plot.name} is not drawn: pip install 'tunesmith[plot]')"]
    elif save_radar_plot(plot, radar):
        chart = ["", f"![behavior]({plot.name})"]
    return ["## Behavior of all models", "", about, *chart, "", format_radar(radar).rstrip()]


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
