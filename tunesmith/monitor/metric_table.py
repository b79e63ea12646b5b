"""The metrics of a run as a table with one row per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
