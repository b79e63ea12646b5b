"""A comparison as a picture, by matplotlib, which the extra `plot` brings and which is imported only here."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

from tunesmith.errors import ConfigError
from tunesmith.pipeline.eval.comparison import Comparison, Estimate, SetComparison
from tunesmith.storage import open_atomic

PANEL_INCHES = (3.2, 3.2)


def check_plot() -> None:
    """Raise when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'tunesmith[plot]', or leave the plot out")


def save_plot(path: Path, comparison: Comparison) -> None:
    """Bars with their 95 % intervals: a row for each task set, a panel for each number, a bar for each model."""
    from matplotlib.figure import Figure

    rows = [(each, list_panels(each)) for each in comparison.values()]
    num_columns = max(len(names) for _, names in rows)
    figure = Figure(figsize=(PANEL_INCHES[0] * num_columns, PANEL_INCHES[1] * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), num_columns, squeeze=False)
    for (each, names), of_row in zip(rows, axes, strict=True):
        for panel in of_row[len(names) :]:
            panel.set_axis_off()
        for name, panel in zip(names, of_row, strict=False):
            found = {label: r.estimates[name] for label, r in each.results.items() if name in r.estimates}
            means = [estimate.mean for estimate in found.values()]
            arms = [measure_arms(estimate) for estimate in found.values()]
            panel.bar(list(found), means, yerr=list(zip(*arms, strict=True)), capsize=4, color="0.7", edgecolor="0.2")
            panel.set_title(f"{each.name}: {name.replace('_', ' ')}", fontsize=9)
            if all(estimate.is_share for estimate in found.values()):
                panel.set_ylim(0, 1)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    with open_atomic(path) as file:
        file.write(picture.getvalue())


def measure_arms(estimate: Estimate) -> tuple[float, float]:
    """From the mean down and up to the ends of its interval, which rounding may put past it where all scores agree."""
    low, high = estimate.interval
    return max(0.0, estimate.mean - low), max(0.0, high - estimate.mean)


def list_panels(comparison: SetComparison) -> list[str]:
    """The numbers that any model has, in the order of the table."""
    return list({name: None for result in comparison.results.values() for name in result.estimates})
