"""Comparison of several models on the same held-out tasks: estimates with intervals, and paired tests of differences.

Every estimate is a mean over tasks of a task's mean over its rollouts. Pairs of models are compared task by task.
Models keep the order in which they were given, normally that of the training stages; each is compared with every later
one.

It is shown as Markdown tables, aligned so that they are readable on a terminal, and as bar charts.
"""

from __future__ import annotations

import importlib.util
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.commands.eval.results import MEASURES
from tunesmith.commands.eval.sample_scores import (
    REWARD,
    SAMPLE_STATS,
    Difference,
    Interval,
    TaskScores,
    collect_outcomes,
    compare_known,
    compute_bootstrap_interval,
    compute_pass_at_k_by_task,
    list_reported_metrics,
    scores_to_json,
)
from tunesmith.errors import ConfigError
from tunesmith.storage import open_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


COUNTS = ("sampled_tokens", "tool_calls", "turns", *MEASURES)
"""Quantities that are counts or ratios, not proportions, even when every value is 0 or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks."""

    mean: float
    interval: Interval
    """95 % bootstrap interval over tasks."""
    num_tasks: int
    """Tasks on which the quantity is known."""
    is_share: bool
    """Whether the quantity is a proportion: 0 or 1 for every rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """One model on one task set."""

    label: str
    path: str
    tasks: Sequence[TaskScores]
    estimates: Mapping[str, Estimate]
    """By name: reward, reported metrics, pass@k, sampled_tokens, tool_calls, turns, truncated."""
    seconds: float
    """Time of the rollouts, without loading the model."""

    @property
    def num_runs(self) -> int:
        return sum(len(task.samples) for task in self.tasks)

    @property
    def num_failures(self) -> int:
        return sum(sample.failure is not None for task in self.tasks for sample in task.samples)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(sample.sampled_tokens for task in self.tasks for sample in task.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """The difference of two models in one quantity."""

    before: str
    after: str
    name: str
    difference: Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class SetComparison:
    """All models on one task set."""

    name: str
    results: Mapping[str, ModelResult]
    """By label."""
    contrasts: Sequence[Contrast]
    scorer: str = ""
    """Which measure a suite scored the tasks by; empty without a suite."""

    def to_json(self) -> dict[str, Any]:
        """The content of comparison.json, with every rollout of every task."""
        return {
            "models": {
                label: {
                    "path": result.path,
                    "num_tasks": len(result.tasks),
                    "num_runs": result.num_runs,
                    "num_failures": result.num_failures,
                    "num_sampled_tokens": result.num_sampled_tokens,
                    "seconds": result.seconds,
                    "estimates": {name: asdict(each) for name, each in result.estimates.items()},
                    "tasks": scores_to_json(result.tasks),
                }
                for label, result in self.results.items()
            },
            "contrasts": [asdict(contrast) for contrast in self.contrasts],
            **({"scorer": self.scorer} if self.scorer else {}),
        }


Comparison = Mapping[str, SetComparison]
"""By the name of the task set."""


def compute_result(
    label: str,
    path: str,
    tasks: Sequence[TaskScores],
    *,
    seed: int,
    seconds: float = 0.0,
    outcome_key: str | None = None,
) -> ModelResult:
    """Estimate every quantity that the scores contain."""
    estimates: dict[str, Estimate] = {}
    for name in (REWARD, *list_reported_metrics(tasks)):
        add_estimate(estimates, name, tasks, seed=seed)
    for k, values in compute_pass_at_k_by_task(collect_outcomes(tasks, outcome_key)).items():
        estimates[f"pass@{k}"] = estimate(values, is_share=True, seed=seed)
    for name in SAMPLE_STATS:
        add_estimate(estimates, name, tasks, seed=seed)
    return ModelResult(label=label, path=path, tasks=tasks, estimates=estimates, seconds=seconds)


def add_estimate(estimates: dict[str, Estimate], name: str, tasks: Sequence[TaskScores], *, seed: int) -> None:
    """Estimate one quantity if any rollout has it."""
    scores = [score for task in tasks if (score := task.compute_mean(name)) is not None]
    if scores:
        is_binary = {sample.get(name) for task in tasks for sample in task.samples} <= {0.0, 1.0, None}
        estimates[name] = estimate(scores, is_share=is_binary and name not in COUNTS, seed=seed)


def estimate(scores: Sequence[float], *, is_share: bool, seed: int) -> Estimate:
    return Estimate(
        mean=statistics.fmean(scores),
        interval=compute_bootstrap_interval(scores, seed=seed),
        num_tasks=len(scores),
        is_share=is_share,
    )


def compare_results(name: str, results: Mapping[str, ModelResult], *, seed: int, scorer: str = "") -> SetComparison:
    """Compare each model with each later one, in the reward and in every reported metric."""
    contrasts = []
    for before, after in combinations(results.values(), 2):
        for quantity in (REWARD, *list_reported_metrics([*before.tasks, *after.tasks])):
            difference = compare_quantity(quantity, before.tasks, after.tasks, seed=seed)
            if difference is not None:
                contrasts.append(Contrast(before=before.label, after=after.label, name=quantity, difference=difference))
    return SetComparison(name=name, results=results, contrasts=contrasts, scorer=scorer)


def compare_quantity(
    name: str, before: Sequence[TaskScores], after: Sequence[TaskScores], *, seed: int
) -> Difference | None:
    """Paired difference over the tasks on which both models have the quantity; None when there is no such task."""
    old_scores = {task.task_id: task.compute_mean(name) for task in before}
    scores = {task.task_id: task.compute_mean(name) for task in after}
    return compare_known(map(old_scores.get, scores), scores.values(), seed=seed)


SMALLEST_P_VALUE = 1e-4
"""Smaller p-values are printed as `< 0.0001`."""


def format_comparison(comparison: Comparison) -> str:
    """For each task set a table of the models and a table of their differences."""
    parts = []
    for each in comparison.values():
        tables = [part for table in list_tables(each) for part in ("", format_table(table[0], table[1:]))]
        parts += [f"### {describe_set(each)}", *tables, ""]
    return "\n".join(parts)


def format_html(comparison: Comparison) -> str:
    """The same tables in HTML."""
    parts = []
    for each in comparison.values():
        parts.append(f"<p>{escape(describe_set(each))}</p>")
        parts += [format_html_table(table) for table in list_tables(each)]
    return "".join(parts)


def describe_set(comparison: SetComparison) -> str:
    results = comparison.results.values()
    num_tasks = max(len(result.tasks) for result in results)
    num_runs = max(len(task.samples) for result in results for task in result.tasks)
    text = f"{comparison.name}: {num_tasks} tasks, {num_runs} {'rollout' if num_runs == 1 else 'rollouts'} of each"
    return f"{text}; {comparison.scorer}" if comparison.scorer else text


def list_tables(comparison: SetComparison) -> list[list[list[str]]]:
    """The table of the models and, unless no task differs, the table of their differences, each with its header.

    A quantity is in percent if it is a proportion for each model.
    """
    results = list(comparison.results.values())
    rows = [["mean (95 % interval)", *(result.label for result in results)]]
    for name in list_quantities(comparison):
        found = [result.estimates.get(name) for result in results]
        is_share = all(each is None or each.is_share for each in found)
        rows.append([name.replace("_", " "), *(format_estimate(each, is_share=is_share) for each in found)])
    rows.append(["failed rollouts", *(f"{result.num_failures} of {result.num_runs}" for result in results)])
    contrasts = [each for each in comparison.contrasts if each.difference.num_better or each.difference.num_worse]
    if not contrasts:
        return [rows]
    header = ["difference", "of", "mean", "95 % interval", "better / worse / tasks", "p", "exact test"]
    return [rows, [header, *(format_contrast(each) for each in contrasts)]]


def format_estimate(found: Estimate | None, *, is_share: bool) -> str:
    if found is None:
        return "-"
    return format_interval(found.mean, *found.interval, is_share=is_share)


def format_interval(mean: float, low: float, high: float, *, is_share: bool = False) -> str:
    return f"{mean:.1%} ({low:.1%} - {high:.1%})" if is_share else f"{mean:.4g} ({low:.4g} - {high:.4g})"


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
    """A Markdown table with aligned columns; of the text of a cell, `|` becomes `/`, and white space one space."""
    head, *body = [[" ".join(cell.replace("|", "/").split()) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [head, ["-" * width for width in widths], *body]
    return "\n".join("| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def format_html_table(table: Sequence[Sequence[str]]) -> str:
    """An HTML table; the first row is its header."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table[0])
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EvalResult:
    """Result of an evaluation. It prints as the tables of `comparison.md`, without the rollouts."""

    folder: Path | None
    """Folder of comparison.json (with every rollout) and comparison.md; None if nothing was written."""
    sets: Comparison
    """Task set -> the results of each model and their paired differences."""

    def _iter_estimates(self) -> Iterator[tuple[str, str, str, Estimate]]:
        """Every estimate with its task set, model and quantity."""
        for name, comparison in self.sets.items():
            for label, result in comparison.results.items():
                yield from ((name, label, quantity, each) for quantity, each in result.estimates.items())

    @property
    def metrics(self) -> dict[str, float]:
        """Every mean, by `<task set>/<model>/<quantity>`."""
        return {f"{name}/{label}/{quantity}": each.mean for name, label, quantity, each in self._iter_estimates()}

    def to_pandas(self) -> DataFrame:
        """One row per task set, model and quantity: mean, 95 % interval, number of tasks."""
        from pandas import DataFrame  # half a second to import

        rows = [(*names, each.mean, *each.interval, each.num_tasks) for *names, each in self._iter_estimates()]
        return DataFrame(rows, columns=["set", "model", "quantity", "mean", "low", "high", "num_tasks"])

    def __repr__(self) -> str:
        return format_comparison(self.sets)

    def _repr_html_(self) -> str:
        return format_html(self.sets)


PANEL_INCHES = (3.2, 3.2)


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_plot() -> None:
    if not can_plot():
        raise ConfigError("a plot needs matplotlib: pip install 'tunesmith[plot]', or run without the plot")


def save_plot(path: Path, comparison: Comparison) -> None:
    """Draw bars with 95 % intervals: one row per task set, one panel per quantity, one bar per model."""
    from matplotlib.figure import Figure

    rows = [(each, list_quantities(each)) for each in comparison.values()]
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
    save_figure(path, figure)


def save_figure(path: Path, figure: Figure) -> None:
    """Write a figure of matplotlib as PNG."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    with open_atomic(path) as file:
        file.write(image.getvalue())


def compute_error_bars(estimate: Estimate) -> tuple[float, float]:
    """Lengths below and above the mean, at least 0: rounding may put the mean of equal scores outside its interval."""
    low, high = estimate.interval
    return max(0.0, estimate.mean - low), max(0.0, high - estimate.mean)


def list_quantities(comparison: SetComparison) -> list[str]:
    """Quantities that any model has, in the order of the table."""
    return list({name: None for result in comparison.results.values() for name in result.estimates})
