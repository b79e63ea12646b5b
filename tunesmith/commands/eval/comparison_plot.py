"""Bar charts of a comparison. It imports matplotlib, an optional dependency (extra `plot`), when it draws."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

from tunesmith.commands.eval.comparison import Comparison, Estimate, SetComparison
from tunesmith.errors import ConfigError
from tunesmith.storage import open_atomic

PANEL_INCHES = (3.2, 3.2)


def check_plot() -> None:
    """Raise when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'tunesmith[plot]', or run without the plot")


def save_plot(path: Path, comparison: Comparison) -> None:
    """Draw bars with 95 % intervals: one row per task set, one panel per quantity, one bar per model."""
    from matplotlib.figure import Figure

    rows = [(each, list_panels(each)) for each in comparison.values()]
    num_columns = max(len(names) for _, names in rows)
    figure = Figure(figsize=(PANEL_INCHES[0] * num_columns, PANEL_INCHES[1] * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), num_columns, squeeze=False)
    for (each, names), panels in zip(rows, axes, strict=True):
        for panel in panels[len(names) :]:
            panel.set_axis_off()
        for name, panel in zip(names, panels, strict=False):
            found = {label: r.estimates[name] for label, r in each.results.items() if name in r.estimates}
            means = [estimate.mean for estimate in found.values()]
            error_bars = [compute_error_bars(estimate) for estimate in found.values()]
            panel.bar(
                list(found), means, yerr=list(zip(*error_bars, strict=True)), capsize=4, color="0.7", edgecolor="0.2"
            )
            panel.set_title(f"{each.name}: {name.replace('_', ' ')}", fontsize=9)
            if all(estimate.is_share for estimate in found.values()):
                panel.set_ylim(0, 1)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    with open_atomic(path) as file:
        file.write(image.getvalue())


def compute_error_bars(estimate: Estimate) -> tuple[float, float]:
    """Lengths below and above the mean, at least 0: rounding may put the mean of equal scores outside its interval."""
    low, high = estimate.interval
    return max(0.0, estimate.mean - low), max(0.0, high - estimate.mean)


def list_panels(comparison: SetComparison) -> list[str]:
    """Quantities that any model has, in the order of the table."""
    return list({name: None for result in comparison.results.values() for name in result.estimates})
