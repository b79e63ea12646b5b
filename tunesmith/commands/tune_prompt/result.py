"""The result of `tune_prompt`: the prompt and its metrics, and all prompts that were evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tunesmith.commands.eval.statistics import Difference
from tunesmith.commands.tune_prompt.prompt_runs import PromptScore


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
