"""What else could explain a gain: a reward for the form of calls alone, and a decoder that has to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunesmith.environments import TaskEnvironment, play
from tunesmith.types import Group, Trajectory, WorkflowOutput


def pay_form(groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
    """1 for a readable call of any offered function where one is asked for, and for no call where none fits."""

    def pay(run: Trajectory) -> Trajectory:
        if run.reward is None:
            return run
        return replace(run, reward=run.metrics["called"] if "answer" in run.task.row else run.reward)

    return [replace(group, trajectories=tuple(map(pay, group.trajectories))) for group in groups], {}


async def play_required(task: Mapping[str, Any], model: Any, environment: TaskEnvironment) -> WorkflowOutput:
    """As `play`, with replies that a grammar holds to calls of the offered functions; needs the extra `grammar`."""
    model.options["tool_choice"] = "required"
    return await play(task, model, environment)
