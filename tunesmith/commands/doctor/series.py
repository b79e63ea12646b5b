"""Comparisons between the beginning and the end of a metric, and what stands out in between."""

from __future__ import annotations

import numpy as np

from tunesmith.monitor.metrics_log import RECENT_SHARE, Series

MIN_TREND_STEPS = 10
"""A run has a beginning and an end to compare from this number of steps on."""
MIN_WINDOW_STEPS = 3


def split_ends(series: Series) -> tuple[Series, Series] | None:
    """The first and the last fifth of a series; None if it is too short for a trend."""
    if len(series) < MIN_TREND_STEPS:
        return None
    width = max(MIN_WINDOW_STEPS, len(series) // RECENT_SHARE)
    return series.first(width), series.last(width)


def compute_slope_t(series: Series) -> float:
    """t-statistic of the slope of the least-squares line through the values."""
    x = series.steps - series.steps.mean()
    y = series.values - series.values.mean()
    slope = float(x @ y / (x @ x))
    residual = y - slope * x
    error = float(np.sqrt(residual @ residual / (len(series) - 2) / (x @ x)))
    return slope / error if error > 0 else float(np.sign(slope)) * np.inf


def find_spikes(series: Series, *, factor: float, width: int) -> np.ndarray:
    """Mask of the values above `factor` times the median of the `width` values before them."""
    values = series.values
    medians = [np.median(values[max(index - width, 0) : index]) for index in range(MIN_WINDOW_STEPS, len(values))]
    mask = np.zeros(len(values), bool)
    mask[MIN_WINDOW_STEPS:] = values[MIN_WINDOW_STEPS:] > factor * np.array(medians)
    return mask


def find_longest_streak(mask: np.ndarray) -> int:
    """Length of the longest run of True."""
    longest = current = 0
    for value in mask.tolist():
        current = current + 1 if value else 0
        longest = max(longest, current)
    return longest


def find_best_window(series: Series, width: int) -> Series:
    """The window of `width` steps with the highest mean, among adjacent windows from the first step on."""
    starts = range(0, max(len(series) - width, 0) + 1, width)
    windows = [series.select(slice(start, start + width)) for start in starts]
    return max(windows, key=lambda window: window.mean)
