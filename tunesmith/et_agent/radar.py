"""The behavior of models side by side on five axes, as ET-Agent's radar chart has them (arXiv:2601.06860, section 5).

Accuracy, efficiency, conciseness, successful execution and reasoning length; each larger value is better. The numbers
are the estimates of comparisons whose evaluation measures behavior. A `Radar` is plain JSON values, so that the report
of a pipeline can merge those of several stages. Charts need matplotlib, an optional dependency (extra `plot`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.commands.eval.comparison import Comparison, can_plot, format_interval, format_table, save_figure
from tunesmith.commands.eval.sample_scores import REWARD
from tunesmith.commands.eval.suites import apply_suite
from tunesmith.commands.stage import RADAR
from tunesmith.config import BehaviorSection, EvalConfig

PLOT_FILE = "radar.png"
PANEL_INCHES = (5.2, 4.6)
MIN_AXES = 3
"""A chart needs three axes to enclose an area."""
ABOUT = (
    "Accuracy; correctness per tool call (efficiency); share of trajectories without redundancy (conciseness); "
    "correctness per failed call (successful execution); correctness per 1000 sampled tokens (reasoning length)."
)
ACCURACY, CONCISENESS = "accuracy", "conciseness"
AXES = (ACCURACY, "efficiency", CONCISENESS, "successful_execution", "reasoning_length")
Radar = dict[str, dict[str, dict[str, list[float]]]]
"""Task set -> model -> axis -> mean and 95 % interval (three numbers)."""


def describe_behavior(config: EvalConfig, comparison: Comparison) -> dict[str, Any]:
    """The radar of an `eval` stage, as a figure of its report; none if it does not measure behavior."""
    behavior = apply_suite(config.to_run_config(), config.suite).evaluation.behavior
    if behavior is None:
        return {}
    return {RADAR: build_radar(comparison, behavior, outcome_key=config.outcome_key)}


def format_section(root: Path, figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The report's section on the behavior of all models that any stage evaluated, with a chart; empty if none did."""
    radars = {name: each[RADAR] for name, each in figures.items() if RADAR in each}
    if not radars:
        return []
    radar, chart = merge_radars(radars), []
    if not can_plot():
        chart = ["", f"({PLOT_FILE} is not drawn: pip install 'tunesmith[plot]')"]
    elif save_radar_plot(root / PLOT_FILE, radar):
        chart = ["", f"![behavior]({PLOT_FILE})"]
    return ["", "## Behavior of all models", "", ABOUT, *chart, "", format_radar(radar).rstrip()]


def build_radar(comparison: Comparison, section: BehaviorSection, *, outcome_key: str | None) -> Radar:
    """The axes that each model has; conciseness only if the judge reports it."""
    names = {axis: axis for axis in AXES} | {ACCURACY: outcome_key or REWARD, CONCISENESS: section.conciseness_key}
    return {
        set_name: {
            label: {
                axis: [result.estimates[name].mean, *result.estimates[name].interval]
                for axis, name in names.items()
                if name in result.estimates
            }
            for label, result in each.results.items()
        }
        for set_name, each in comparison.items()
    }


def merge_radars(radars: Mapping[str, Radar]) -> Radar:
    """One radar of those of several stages, by stage; a model that two stages have under one label on one set, with
    other numbers, gets the name of its stage."""
    merged: Radar = {}
    for stage, radar in radars.items():
        for set_name, models in radar.items():
            for label, axes in models.items():
                found = merged.setdefault(set_name, {})
                found[label if found.get(label, axes) == axes else f"{label} ({stage})"] = axes
    return merged


def list_axes(models: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    return [axis for axis in AXES if any(axis in axes for axes in models.values())]


def format_radar(radar: Radar) -> str:
    parts = []
    for set_name, models in radar.items():
        rows = [
            [label, *(format_interval(*axes[axis]) if axis in axes else "-" for axis in AXES)]
            for label, axes in models.items()
        ]
        table = format_table(["mean (95 % interval)", *(axis.replace("_", " ") for axis in AXES)], rows)
        parts += [f"### {set_name}", "", table, ""]
    return "\n".join(parts)


def save_radar_plot(path: Path, radar: Radar) -> bool:
    """Draw one chart per task set with a polygon for each model; False if no set has three axes.

    Each axis runs from 0 to the largest mean of the set, which its label states. A model without an axis has no
    polygon corner there.
    """
    from matplotlib.figure import Figure

    shown = {name: models for name, models in radar.items() if len(list_axes(models)) >= MIN_AXES}
    if not shown:
        return False
    figure = Figure(figsize=(PANEL_INCHES[0] * len(shown), PANEL_INCHES[1]), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False, subplot_kw={"projection": "polar"})[0]
    for panel, (name, models) in zip(panels, shown.items(), strict=True):
        axes = list_axes(models)
        largest = find_largest_means(models, axes)
        angle_of = {axis: 2 * math.pi * number / len(axes) for number, axis in enumerate(axes)}
        for label, found in models.items():
            corners = [
                (angle_of[axis], compute_radius(found[axis][0], largest[axis])) for axis in axes if axis in found
            ]
            if corners:
                angles, radii = zip(*corners, corners[0], strict=True)
                panel.plot(angles, radii, marker="o", markersize=3, label=label)
                panel.fill(angles, radii, alpha=0.08)
        panel.set_xticks(list(angle_of.values()), [f"{axis.replace('_', ' ')}\n{largest[axis]:.3g}" for axis in axes])
        panel.set_yticks([0.5, 1.0], ["", ""])
        panel.set_ylim(0, 1.05)
        panel.tick_params(axis="x", pad=14)
        panel.set_theta_offset(math.pi / 2)
        panel.set_title(name, fontsize=10)
        panel.legend(loc="lower left", bbox_to_anchor=(-0.25, -0.15), fontsize=8)
    save_figure(path, figure)
    return True


def find_largest_means(models: Mapping[str, Mapping[str, Sequence[float]]], axes: Sequence[str]) -> dict[str, float]:
    return {axis: max(0.0, *(found[axis][0] for found in models.values() if axis in found)) for axis in axes}


def compute_radius(mean: float, largest: float) -> float:
    """Share of the axis; negative means are drawn in the center."""
    return max(0.0, mean) / largest if largest else 0.0
