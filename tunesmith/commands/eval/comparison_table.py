"""A comparison as Markdown tables, aligned so that they are readable on a terminal, and as the result of `evaluate`.

Bar charts of a comparison. It imports matplotlib, an optional dependency (extra `plot`), when it draws.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.commands.eval.comparison import Comparison, Contrast, Estimate, SetComparison
from tunesmith.errors import ConfigError
from tunesmith.runs.result import Result
from tunesmith.storage import open_atomic

if TYPE_CHECKING:
    from pandas import DataFrame


SMALLEST_P_VALUE = 1e-4
"""Smaller p-values are printed as `< 0.0001`."""


def format_comparison(comparison: Comparison) -> str:
    """For each task set a table of the models and a table of their differences."""
    return "\n".join(format_set(each) for each in comparison.values())


def format_html(comparison: Comparison) -> str:
    """The same tables in HTML."""
    parts = []
    for each in comparison.values():
        parts.append(f"<p>{escape(describe_set(each))}</p>")
        parts += [format_html_table(table) for table in list_tables(each)]
    return "".join(parts)


def format_set(comparison: SetComparison) -> str:
    """One row per quantity, then one row per pair of models and quantity in which at least one task differs."""
    tables = [part for table in list_tables(comparison) for part in ("", format_table(table[0], table[1:]))]
    return "\n".join([f"### {describe_set(comparison)}", *tables, ""])


def describe_set(comparison: SetComparison) -> str:
    results = comparison.results.values()
    num_tasks = max(len(result.tasks) for result in results)
    num_runs = max(len(task.samples) for result in results for task in result.tasks)
    text = f"{comparison.name}: {num_tasks} tasks, {num_runs} {'rollout' if num_runs == 1 else 'rollouts'} of each"
    return f"{text}; {comparison.scorer}" if comparison.scorer else text


def list_tables(comparison: SetComparison) -> list[list[list[str]]]:
    """The table of the models and, unless no task differs, the table of their differences, each with its header."""
    results = list(comparison.results.values())
    names = {name: None for result in results for name in result.estimates}
    rows = [["mean (95 % interval)", *(result.label for result in results)]]
    rows += [format_row(name, [result.estimates.get(name) for result in results]) for name in names]
    rows.append(["failed rollouts", *(f"{result.num_failures} of {result.num_runs}" for result in results)])
    contrasts = [each for each in comparison.contrasts if each.difference.num_better or each.difference.num_worse]
    if not contrasts:
        return [rows]
    header = ["difference", "of", "mean", "95 % interval", "better / worse / tasks", "p", "exact test"]
    return [rows, [header, *(format_contrast(each) for each in contrasts)]]


def format_row(name: str, found: Sequence[Estimate | None]) -> list[str]:
    """One quantity of all models, in percent if it is a proportion for each of them."""
    is_share = all(each is None or each.is_share for each in found)
    return [name.replace("_", " "), *(format_estimate(each, is_share=is_share) for each in found)]


def format_estimate(found: Estimate | None, *, is_share: bool) -> str:
    if found is None:
        return "-"
    low, high = found.interval
    if is_share:
        return f"{found.mean:.1%} ({low:.1%} - {high:.1%})"
    return f"{found.mean:.4g} ({low:.4g} - {high:.4g})"


def format_contrast(contrast: Contrast) -> list[str]:
    found = contrast.difference
    low, high = found.interval
    p_value = f"< {SMALLEST_P_VALUE:g}" if found.p_value < SMALLEST_P_VALUE else f"{found.p_value:.4f}"
    return [
        f"{contrast.before} -> {contrast.after}",
        contrast.name.replace("_", " "),
        f"{found.mean:+.4f}",
        f"{low:+.4f} to {high:+.4f}",
        f"{found.num_better} / {found.num_worse} / {found.num_tasks}",
        p_value,
        found.test,
    ]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def format_html_table(table: Sequence[Sequence[str]]) -> str:
    """An HTML table; the first row is its header."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table[0])
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


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
