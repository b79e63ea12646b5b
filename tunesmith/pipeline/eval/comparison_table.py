"""A comparison as Markdown tables, aligned so that they are readable on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.pipeline.eval.comparison import Comparison, Contrast, Estimate, SetComparison

SMALLEST_P_VALUE = 1e-4
"""Smaller p-values are printed as `< 0.0001`."""


def format_comparison(comparison: Comparison) -> str:
    """For each task set a table of the models and a table of their differences."""
    return "\n".join(format_set(each) for each in comparison.values())


def format_set(comparison: SetComparison) -> str:
    """One row per quantity, then one row per pair of models and quantity in which at least one task differs."""
    results = list(comparison.results.values())
    num_tasks = max(len(result.tasks) for result in results)
    num_runs = max(len(task.samples) for result in results for task in result.tasks)
    title = f"### {comparison.name}: {num_tasks} tasks, {num_runs} {'rollout' if num_runs == 1 else 'rollouts'} of each"
    names = {name: None for result in results for name in result.estimates}
    rows = [format_row(name, [result.estimates.get(name) for result in results]) for name in names]
    rows.append(["failed rollouts", *(f"{result.num_failures} of {result.num_runs}" for result in results)])
    parts = [title, "", format_table(["mean (95 % interval)", *(result.label for result in results)], rows)]
    contrasts = [each for each in comparison.contrasts if each.difference.num_better or each.difference.num_worse]
    if contrasts:
        header = ["difference", "of", "mean", "95 % interval", "better / worse / tasks", "p", "exact test"]
        parts += ["", format_table(header, [format_contrast(each) for each in contrasts])]
    return "\n".join([*parts, ""])


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
