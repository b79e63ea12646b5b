"""The training tasks of a run and the selector that chooses among them.

Within a step tasks are selected once or in several rounds. After the step the selector receives the pass rates of all
of them, before it chooses the tasks of the next step.
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
        self._selected: list[int] = []
        self._selections: list[Selection] = []

    def select(self, num_tasks: int) -> list[Task]:
        """The next tasks."""
        indices = select_indices(self.selector, num_tasks, num_tasks=len(self.tasks))
        self._selected += indices
        if isinstance(self.selector, ExplainingSelector):
            self._selections.append(self.selector.explain())
        return [self.tasks[index] for index in indices]

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
