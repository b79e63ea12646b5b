"""Console output of a run: a progress bar, and one line of key metrics per step.

Everything goes to stderr, so that stdout has only the result of a command. Without a terminal only lines are printed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import IO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

Part = tuple[tuple[str, ...], Callable[..., str]]
"""Names of metrics, and a function that writes their values."""
REWARD: Part = (("rollout/reward_mean",), "reward {:.3f}".format)
SAMPLED_SPEED: Part = (("perf/sampled_tokens_per_s",), "{:.0f} tok/s".format)
LINE_PARTS: Sequence[Part] = (
    REWARD,
    (("rollout/num_failed",), lambda number: f"failed {number:.0f}" if number else ""),
    (("experience/num_useful_groups", "experience/num_tasks_tried"), "useful {:.0f}/{:.0f}".format),
    (
        ("rollout/num_truncated", "rollout/num_trajectories"),
        lambda number, total: f"trunc {number / total:.0%}" if total else "",
    ),
    SAMPLED_SPEED,
    (("perf/step_s",), lambda seconds: f"{seconds:.{1 if seconds < 100 else 0}f} s"),
)
"""The line of a step of reinforcement learning, in order."""
OFFLINE_LINE_PARTS: Sequence[Part] = (
    (("train/loss",), "loss {:+.4f}".format),
    (("train/grad_norm",), "grad {:.3f}".format),
    (("perf/trained_tokens_per_s",), "{:.0f} tok/s".format),
    (("perf/train_s",), "{:.1f} s".format),
)
"""The line of a step of fine-tuning, which has no reward."""
LINE_WIDTH = 80
NUM_TIMED_STEPS = 20
"""The remaining time is estimated from the last `NUM_TIMED_STEPS` steps."""


class ConsoleProgress:
    """Console output of a run of `total_steps`, of which `first_step` are already done."""

    def __init__(
        self,
        *,
        first_step: int = 0,
        total_steps: int = 0,
        has_progress: bool = False,
        log_interval_steps: int = 1,
        more_metrics: Sequence[str] = (),
        stream: IO[str] | None = None,
    ) -> None:
        # In a notebook rich would add one output cell per line, and stderr has a red background: print plain text.
        is_notebook = RichConsole().is_jupyter
        self._console = RichConsole(
            file=stream,
            stderr=stream is None and not is_notebook,
            highlight=False,
            soft_wrap=True,
            force_jupyter=False,
            force_terminal=False if is_notebook else None,
        )
        self._total_steps = total_steps
        self._interval = log_interval_steps
        self._more_metrics = tuple(more_metrics)
        self._started = time.monotonic()
        self._ends: deque[tuple[int, float]] = deque([(first_step, self._started)], maxlen=NUM_TIMED_STEPS + 1)
        self._progress: Progress | None = None
        if has_progress and self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[numbers]}"),
                TextColumn("{task.fields[status]}", style="dim"),
                console=self._console,
                refresh_per_second=4,
            )
            self._bar = self._progress.add_task("", total=total_steps, completed=first_step, numbers="", status="")
            self._progress.start()

    def show_status(self, text: str) -> None:
        """Set the current activity in the progress bar; without one nothing is shown."""
        if self._progress is not None:
            self._progress.update(self._bar, status=text)

    def show_done(self, step: int, text: str) -> None:
        """Report the end of a step that has no training metrics."""
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, status="")
        self.show_line(text)

    def show_line(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False)

    def show_train(self, step: int, metrics: Mapping[str, float]) -> None:
        self._ends.append((step, time.monotonic()))
        remaining = format_duration(self._compute_remaining_s(step)).replace(" min", "m").replace(" ", "")
        eta = f"eta {remaining}"
        if self._progress is not None:
            numbers = format_parts((REWARD, SAMPLED_SPEED), metrics)
            self._progress.update(self._bar, completed=step, numbers="  ".join([*numbers, eta]))
        if step % self._interval == 0 or step == self._total_steps:
            has_rollouts = any(name.startswith("rollout/") for name in metrics)  # without a reward if all failed
            parts = LINE_PARTS if has_rollouts else OFFLINE_LINE_PARTS
            width = len(str(self._total_steps))
            shown = [f"step {step:{width}d}/{self._total_steps}", *format_parts(parts, metrics), eta]
            gap = "  " if len("  ".join(shown)) <= LINE_WIDTH else " "
            self.show_line(gap.join(shown + format_more(self._more_metrics, metrics, parts)))

    def show_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        rest = dict(metrics)
        shown = [format_reward(name, rest) for name in metrics if name.startswith("eval/") and name.endswith("/reward")]
        seconds = rest.pop("perf/evaluation_s", None)
        shown += [f"{name.removeprefix('eval/')} {value:.4g}" for name, value in rest.items()]
        shown += [] if seconds is None else [f"{seconds:.1f} s"]
        self.show_line("  ".join([f"eval at step {step}", *shown]))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _compute_remaining_s(self, step: int) -> float:
        first_step, first_time = self._ends[0]
        s_per_step = (self._ends[-1][1] - first_time) / max(step - first_step, 1)
        return s_per_step * max(self._total_steps - step, 0)


def format_reward(name: str, metrics: dict[str, float]) -> str:
    """The mean reward of a held-out set with its interval and counts, which are removed from `metrics`."""
    prefix = name.removesuffix("/reward")
    keys = ("reward", "reward_low", "reward_high", "num_tasks", "num_failures")
    reward, low, high, num_tasks, num_failures = (metrics.pop(f"{prefix}/{key}", None) for key in keys)
    text = f"{prefix.removeprefix('eval/')} {reward:.3f}"
    text += "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    text += "" if num_tasks is None else f" on {num_tasks:.0f} tasks"
    return text + (f", {num_failures:.0f} failed" if num_failures else "")


def format_parts(parts: Sequence[Part], metrics: Mapping[str, float]) -> list[str]:
    """The parts of a line whose metrics there are."""
    written = [write(*(metrics[name] for name in names)) for names, write in parts if metrics.keys() >= set(names)]
    return [text for text in written if text]


def format_more(patterns: Sequence[str], metrics: Mapping[str, float], parts: Sequence[Part]) -> list[str]:
    """The metrics matching the patterns that the line does not show already; `-` for a pattern without a match."""
    in_line = {name for names, _ in parts for name in names}
    shown: dict[str, str] = {}
    for pattern in patterns:
        found = [name for name in metrics if fnmatchcase(name, pattern)]
        for name in found or [pattern]:
            value = f"{metrics[name]:.4g}" if name in metrics else "-"
            if name not in in_line:
                shown[name] = f"{name.removeprefix('rollout/')} {value}"
    return list(shown.values())


def format_duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s` or `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
