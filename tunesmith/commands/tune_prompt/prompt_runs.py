"""Runs of the agent under system prompts: each prompt once on each task.

A run is a function of its prompt and its task, so a prompt that the optimizer evaluates again costs nothing.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.commands.candidates.models import LoadedModel
from tunesmith.commands.candidates.runs import (
    RunLimits,
    count_failures,
    find_problem,
    list_run_causes,
    run_agent,
)
from tunesmith.errors import RolloutError
from tunesmith.rollout.failures import shorten
from tunesmith.rollout.runner import Agent
from tunesmith.types import JudgeType, Task, Trajectory

MAX_SHOWN_CHARS = 200
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScore:
    """A prompt and its runs on the training tasks."""

    prompt: str
    reward: float | None
    """Mean reward of the runs that did not fail; None if there is none."""
    num_runs: int
    num_failures: int
    causes: tuple[str, ...]
    """The most frequent failures."""


@dataclass(slots=True, kw_only=True)
class PromptRuns:
    """The runs so far."""

    tasks: Sequence[Task]
    workflow: Callable[..., Any]
    judge: JudgeType
    model: LoadedModel
    limits: RunLimits
    show: Callable[[str], None]
    """Prints a line of progress."""
    done: dict[str, dict[int, Trajectory]] = field(default_factory=dict)
    """Prompt -> position of the task -> its run."""
    scored: dict[str, set[int]] = field(default_factory=dict)
    """Prompt -> positions of the tasks of its scores; other runs are examples for the proposing model."""

    async def run(self, prompt: str, positions: Sequence[int]) -> list[Trajectory]:
        """The runs of a prompt on tasks, by their positions."""
        known = self.done.setdefault(prompt, {})
        missing = [position for position in dict.fromkeys(positions) if position not in known]
        if missing:
            agent = Agent(
                workflow=functools.partial(self.workflow, system_prompt=prompt),
                judge=self.judge,
                timeout_s=self.limits.timeout_s,
                logger=logger,
            )
            tasks = [self.tasks[position] for position in missing]
            runs = await run_agent(tasks, agent=agent, model=self.model.provider, limits=self.limits)
            known.update(zip(missing, runs, strict=True))
        return [known[position] for position in positions]

    async def score(self, prompt: str, positions: Sequence[int], *, name: str | None = None) -> float:
        """Mean reward of a prompt on tasks; minus infinity, which is never chosen, if too many runs fail.

        Raises RolloutError if too many runs of the first prompt fail. `name` is printed instead of its number.
        """
        runs = await self.run(prompt, positions)
        is_new = prompt not in self.scored
        self.scored.setdefault(prompt, set()).update(positions)
        number = list(self.scored).index(prompt)
        is_shown = is_new and name is None
        name = name or (f"prompt {number}" if number else "initial prompt")
        if is_shown:
            self.show(f"{name}: {shorten(prompt, MAX_SHOWN_CHARS)}")
        if (problem := find_problem(runs, self.limits)) is not None:
            if number == 0:
                raise RolloutError(f"the {name} cannot be evaluated: {problem}")
            logger.warning("%s is not eligible: %s", name, problem)
            return -math.inf
        reward = compute_mean(runs)
        assert reward is not None
        self.show(f"{name}: reward {reward:.4g} on {len(runs)} tasks, {count_failures(runs)} failed")
        return reward

    def list_scores(self) -> list[PromptScore]:
        """Every prompt, in the order of their first evaluation; the first is the initial one."""
        return [
            summarize(prompt, [self.done[prompt][position] for position in sorted(positions)])
            for prompt, positions in self.scored.items()
        ]

    @property
    def num_runs(self) -> int:
        return sum(map(len, self.done.values()))


def compute_mean(runs: Sequence[Trajectory]) -> float | None:
    rewards = [run.reward for run in runs if run.reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def summarize(prompt: str, runs: Sequence[Trajectory]) -> PromptScore:
    return PromptScore(
        prompt=prompt,
        reward=compute_mean(runs),
        num_runs=len(runs),
        num_failures=count_failures(runs),
        causes=tuple(list_run_causes(runs)),
    )
