"""The training tasks of a run and the selector that chooses among them.

Within a step tasks are selected once or in several rounds. After the step the selector receives the pass rates of all
of them, before it chooses the tasks of the next step. With `rollout.max_staleness` tasks are drawn ahead, and a step
reports those that it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tunesmith.storage import save_json
from tunesmith.tasks.selector import ExplainingSelector, ObservingSelector, Selection, Selector, select_indices
from tunesmith.types import Group, Task


class TaskFeed:
    """Selects tasks and reports their pass rates to the selector."""

    def __init__(self, tasks: Sequence[Task], selector: Selector) -> None:
        self.tasks = tasks
        self.selector = selector
        self.requeued: list[int] = []
        """Tasks that run again, before the selector's next ones: their rollouts were dropped."""
        self._selected: list[int] = []
        self._selections: list[Selection] = []

    def select(self, num_tasks: int) -> list[Task]:
        """The next tasks, run in this step."""
        indices = self.draw(num_tasks)
        self.add_selected(indices)
        return [self.tasks[index] for index in indices]

    def draw(self, num_tasks: int) -> list[int]:
        """Indices of the next tasks, which a step may train later: `add_selected` names those that it does."""
        again, self.requeued = self.requeued[:num_tasks], self.requeued[num_tasks:]
        if len(again) == num_tasks:
            return again
        indices = select_indices(self.selector, num_tasks - len(again), num_tasks=len(self.tasks))
        if isinstance(self.selector, ExplainingSelector):
            self._selections.append(self.selector.explain())
        return again + indices

    def add_selected(self, indices: Sequence[int]) -> None:
        """Tasks of this step, whose pass rates come next."""
        self._selected += indices

    def requeue(self, indices: Sequence[int]) -> None:
        """Let tasks run again, before others."""
        self.requeued += indices

    def give_feedback(
        self, pass_rates: Sequence[float | None], groups: Sequence[Group] | None = None
    ) -> dict[str, float]:
        """Report the pass rates of the tasks selected in this step, in the order of selection; None is not reported.

        `groups`, in the same order, are reported to selectors that learn from rollouts.
        """
        if groups is not None and isinstance(self.selector, ObservingSelector):
            self.selector.observe(self._selected, groups)
        known = [(index, rate) for index, rate in zip(self._selected, pass_rates, strict=True) if rate is not None]
        self._selected = []
        return dict(self.selector.feedback([index for index, _ in known], [rate for _, rate in known]) or {})

    def save_selection(self, path: Path) -> None:
        """Write the choices of this step and their reasons, if the selector explains them."""
        selections, self._selections = self._selections, []
        choices = [
            asdict(choice) | {"task_id": self.tasks[choice.index].task_id}
            for selection in selections
            for choice in selection.choices
        ]
        if choices:
            last = selections[-1]
            save_json(path, {"choices": choices, "summary": dict(last.summary), "histogram": list(last.histogram)})
