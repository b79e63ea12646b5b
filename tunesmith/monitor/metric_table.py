"""The metrics of a run as a table with one row per step, and a metric as a small SVG, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, repr=False)
class MetricTable:
    """One row per step with the metrics of training and of the evaluation after it; `table[name]` is a column."""

    rows: Mapping[int, Mapping[str, float | None]]
    """Step -> name -> value, in order of the steps. None is a value that was not finite."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a row; 0 is an evaluation before the first step."""
        return tuple(self.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all metrics, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows.values() for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> list[float | None]:
        """The values of one metric, aligned with `steps`; None at steps without it."""
        if name not in self.columns:
            raise KeyError(f"there is no metric {name!r}; see .columns")
        return [row.get(name) for row in self.rows.values()]

    def collect_points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, without steps that have no value; empty if no step has one."""
        values = {step: row.get(name) for step, row in self.rows.items()}
        return [(step, value) for step, value in values.items() if value is not None]

    def to_pandas(self) -> DataFrame:
        """A DataFrame indexed by step; missing values are NaN."""
        from pandas import DataFrame, Index  # half a second to import

        columns = {name: self[name] for name in self.columns}
        return DataFrame(columns, index=Index(self.steps, name="step"), dtype=float)

    def __repr__(self) -> str:
        if not self.rows:
            return "MetricTable: no steps"
        return f"MetricTable: steps {self.steps[0]} to {self.steps[-1]}, {len(self.columns)} columns"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>{self.to_pandas()._repr_html_()}"


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
