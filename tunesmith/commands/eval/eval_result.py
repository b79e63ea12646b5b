"""The result of `evaluate`: the comparison of the models on each task set, and where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.commands.eval.comparison import Comparison
from tunesmith.commands.eval.comparison_table import format_comparison, format_html
from tunesmith.runs.result import Result

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EvalResult(Result):
    """Result of an evaluation. It prints as the tables of `comparison.md`, without the rollouts."""

    folder: Path | None
    """Folder of comparison.json (with every rollout) and comparison.md; None if nothing was written."""
    sets: Comparison
    """Task set -> the results of each model and their paired differences."""

    @property
    def metrics(self) -> dict[str, float]:
        """Every mean, by `<task set>/<model>/<quantity>`."""
        return {
            f"{name}/{label}/{quantity}": each.mean
            for name, comparison in self.sets.items()
            for label, result in comparison.results.items()
            for quantity, each in result.estimates.items()
        }

    def to_pandas(self) -> DataFrame:
        """One row per task set, model and quantity: mean, 95 % interval, number of tasks."""
        from pandas import DataFrame  # half a second to import

        rows = [
            (name, label, quantity, each.mean, *each.interval, each.num_tasks)
            for name, comparison in self.sets.items()
            for label, result in comparison.results.items()
            for quantity, each in result.estimates.items()
        ]
        return DataFrame(rows, columns=["set", "model", "quantity", "mean", "low", "high", "num_tasks"])

    def list_facts(self) -> Mapping[str, str]:
        return {"folder": str(self.folder)}

    def __repr__(self) -> str:
        return format_comparison(self.sets)

    def _repr_html_(self) -> str:
        return format_html(self.sets)
