"""A metric over the steps as a small SVG, for results in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 360, 90, 6


def draw_curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """A line through the points (step, value), with the first and last value as text; empty below two points."""
    if len(points) < 2:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    x_scale = (WIDTH - 2 * MARGIN) / (steps[-1] - steps[0])
    y_scale = (HEIGHT - 2 * MARGIN) / (high - low or 1.0)
    line = " ".join(
        f"{MARGIN + (step - steps[0]) * x_scale:.1f},{HEIGHT - MARGIN - (value - low) * y_scale:.1f}"
        for step, value in points
    )
    label = f"{name}: {values[0]:.4g} at step {steps[0]}, {values[-1]:.4g} at step {steps[-1]}"
    return (
        f'<div>{escape(label)}<br><svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg></div>'
    )
