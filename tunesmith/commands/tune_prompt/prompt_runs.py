"""Runs of the agent under system prompts, each prompt once on each task; the model that proposes prompts; the result.

A run is a function of its prompt and its task, so a prompt that the optimizer evaluates again costs nothing.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from openai.types.chat import ChatCompletion

from tunesmith.chat.client import create_chat_completion
from tunesmith.commands.candidates import RunLimits, count_failures, find_problem, run_agent
from tunesmith.commands.eval.sample_scores import Difference
from tunesmith.errors import RolloutError, shorten
from tunesmith.judges.numeric import read_text
from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.seeds import derive_seed
from tunesmith.runs.policy import LoadedModel
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
            model, engine = self.model.provider, self.model.engine
            runs = await run_agent(tasks, agent=agent, model=model, engine=engine, limits=self.limits)
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
        causes=tuple(list_causes(run.failure for run in runs)),
    )


class Teacher:
    """The model that proposes prompts: in this process, on a server, or a chat model of the caller."""

    def __init__(self, model: LoadedModel, *, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._numbers = itertools.count()

    async def ask(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
        """The reply's text; `fields` are sampling parameters, which a caller's chat model chooses itself."""
        seed = derive_seed(self._seed, "teacher", next(self._numbers))
        bound, engine = self._model.provider.open(seed=seed, order=()), self._model.engine
        try:
            if engine is not None:  # the search asks between runs, which pause the engine that both may share
                engine.resume(0)
            if hasattr(bound.model, "options") and hasattr(bound.model, "client"):
                reply: Any = await create_chat_completion(bound.model, messages, **fields)
            else:
                reply = await bound.model([dict(message) for message in messages])
            if isinstance(reply, ChatCompletion):
                return reply.choices[0].message.content or ""
            if isinstance(reply, AsyncIterator):
                reply = [chunk async for chunk in reply][-1]  # AgentScope's chunks hold the text so far
            return read_text(reply)
        except Exception as error:  # the caller's model, or a server
            raise RolloutError(f"the model that proposes prompts failed: {type(error).__name__}: {error}") from error
        finally:
            if engine is not None:
                engine.pause()
            bound.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Both prompts on the held-out tasks."""

    initial: PromptScore | None
    """None if the initial prompt was not evaluated."""
    tuned: PromptScore
    difference: Difference | None
    """Tuned minus initial prompt on the tasks that both were scored on; None if there is none."""


class PromptTuneResult(tuple[str, dict[str, float]]):
    """The best prompt and its metrics, as a pair, with what they were chosen from."""

    initial_prompt: str
    candidates: tuple[PromptScore, ...]
    """Every prompt that was evaluated on training tasks; the first is the initial one."""
    held_out: HeldOutScores | None

    @classmethod
    def build(
        cls,
        prompt: str,
        *,
        initial_prompt: str,
        candidates: Sequence[PromptScore],
        num_runs: int,
        held_out: HeldOutScores | None,
    ) -> Self:
        metrics = {"num_runs": float(num_runs)} | compute_metrics(prompt, initial_prompt, candidates, held_out)
        result = cls((prompt, metrics))
        result.initial_prompt, result.candidates, result.held_out = initial_prompt, tuple(candidates), held_out
        return result

    @property
    def prompt(self) -> str:
        return self[0]

    @property
    def metrics(self) -> dict[str, float]:
        return self[1]

    @property
    def is_improved(self) -> bool | None:
        """Whether the 95 % interval of the change of the reward on the held-out tasks is above 0; None if unknown."""
        if self.prompt == self.initial_prompt:
            return False
        difference = None if self.held_out is None else self.held_out.difference
        return None if difference is None else difference.interval[0] > 0

    def describe(self) -> str:
        """One sentence: whether and by how much the prompt is better."""
        if self.prompt == self.initial_prompt:
            return f"No improvement: none of {len(self.candidates) - 1} other prompts has a higher reward in training."
        difference = None if self.held_out is None else self.held_out.difference
        if difference is None:
            return "The prompt was not compared with the initial one on held-out tasks."
        low, high = difference.interval
        start = "Improvement" if self.is_improved else "No improvement"
        if difference.mean > 0 and not self.is_improved:
            start = "No significant improvement"
        return (
            f"{start} on {difference.num_tasks} held-out tasks: the reward changes by {difference.mean:+.4g} "
            f"(95 % interval {low:+.4g} to {high:+.4g}, p = {difference.p_value:.2g})."
        )


def compute_metrics(
    prompt: str, initial_prompt: str, candidates: Sequence[PromptScore], held_out: HeldOutScores | None
) -> dict[str, float]:
    """`valset_improvement` (percent) as AgentScope has it, and the numbers that it is computed from."""
    metrics = {
        "num_prompts": float(len(candidates)),
        "num_failed": float(sum(each.num_failures for each in candidates)),
    }
    rewards = {each.prompt: each.reward for each in candidates}
    for name, each in (("initial", initial_prompt), ("tuned", prompt)):
        if (reward := rewards.get(each)) is not None:
            metrics[f"train_reward_{name}"] = reward
    if held_out is None:
        return metrics
    for name, score in (("initial", held_out.initial), ("tuned", held_out.tuned)):
        if score is not None:
            metrics |= {f"eval_num_failed_{name}": float(score.num_failures)}
            metrics |= {} if score.reward is None else {f"eval_reward_{name}": score.reward}
    if held_out.difference is not None and held_out.initial is not None:
        metrics["valset_improvement"] = compute_improvement(held_out.difference.mean, held_out.initial.reward)
        metrics["eval_p_value"] = held_out.difference.p_value
    return metrics


def compute_improvement(difference: float, before: float | None) -> float:
    """Change in percent of the initial reward's size; infinite if that is 0 and the reward changes."""
    if difference == 0 or before is None:
        return 0.0
    return 100 * difference / abs(before) if before else math.copysign(math.inf, difference)
