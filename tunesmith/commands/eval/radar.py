"""The behavior of models side by side on five axes, as ET-Agent's radar chart has them (arXiv:2601.06860, section 5).

Accuracy, efficiency, conciseness, successful execution and reasoning length; each larger value is better. The numbers
are the estimates of comparisons whose evaluation measures behavior. A `Radar` is plain JSON values, so that the report
of a pipeline can merge those of several stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunesmith.commands.eval.comparison import Comparison
from tunesmith.commands.eval.comparison_table import format_table
from tunesmith.commands.eval.sample_scores import REWARD
from tunesmith.config import BehaviorSection

ACCURACY, CONCISENESS = "accuracy", "conciseness"
AXES = (ACCURACY, "efficiency", CONCISENESS, "successful_execution", "reasoning_length")
Radar = dict[str, dict[str, dict[str, list[float]]]]
"""Task set -> model -> axis -> mean and 95 % interval (three numbers)."""


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
    """The axes that any model of a set has, in order."""
    return [axis for axis in AXES if any(axis in axes for axes in models.values())]


def format_radar(radar: Radar) -> str:
    """For each set a table with a row for each model."""
    parts = []
    for set_name, models in radar.items():
        rows = [[label, *(format_cell(axes.get(axis)) for axis in AXES)] for label, axes in models.items()]
        table = format_table(["mean (95 % interval)", *(axis.replace("_", " ") for axis in AXES)], rows)
        parts += [f"### {set_name}", "", table, ""]
    return "\n".join(parts)


def format_cell(numbers: Sequence[float] | None) -> str:
    if numbers is None:
        return "-"
    mean, low, high = numbers
    return f"{mean:.4g} ({low:.4g} - {high:.4g})"
