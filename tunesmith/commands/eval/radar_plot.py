"""Radar charts of behavior. It imports matplotlib, an optional dependency (extra `plot`), when it draws."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunesmith.commands.eval.radar import Radar, list_axes
from tunesmith.storage import open_atomic

PANEL_INCHES = (5.2, 4.6)
MIN_AXES = 3
"""A chart needs three axes to enclose an area."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


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
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    with open_atomic(path) as file:
        file.write(image.getvalue())
    return True


def find_largest_means(models: Mapping[str, Mapping[str, Sequence[float]]], axes: Sequence[str]) -> dict[str, float]:
    """The largest mean of each axis, 0 if none is positive."""
    return {axis: max(0.0, *(found[axis][0] for found in models.values() if axis in found)) for axis in axes}


def compute_radius(mean: float, largest: float) -> float:
    """Share of the axis; negative means are drawn in the center."""
    return max(0.0, mean) / largest if largest else 0.0
