"""Steps that teach the model nothing: why, on the console at once and again when the run ends.

Settings with which no step can teach anything are errors before the first one. A step teaches when an update with a
gradient changes weights; groups without a difference, rollouts without a token, a gradient of zero and an update that
rounds to nothing do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.table import ALGORITHMS, GROUP_RELATIVE_ADVANTAGES
from tunesmith.chat.messages import Message
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError, RolloutError
from tunesmith.types import Group

SHOWN_STREAKS = frozenset(10**power for power in range(1, 7))
"""Lengths of unbroken rows of such steps that are shown again."""


def check_sampling_differs(config: RunConfig, algorithm: Algorithm) -> None:
    """Refuse to compare rollouts that are all sampled alike."""
    is_comparison = ALGORITHMS[algorithm.name].compute_advantages in GROUP_RELATIVE_ADVANTAGES
    if not is_comparison or "experts" in algorithm.needs:
        return
    for knob, value, is_greedy in (
        ("temperature", config.model.temperature, config.model.temperature == 0),
        ("top_k", config.model.top_k, config.model.top_k == 1),
    ):
        if is_greedy:
            raise ConfigError(
                f"model.{knob}={value} samples equal tokens in all rollouts of a task, and {algorithm.name!r} learns "
                f"only from their differences: raise model.{knob}"
            )


def check_room(renderer: Renderer, *, max_model_len: int, kv_cache_tokens: int | None) -> None:
    """Refuse lengths that leave no room for a reply to even the shortest conversation."""
    shortest = len(renderer.render(Prompt(messages=(Message(role="user", content="?"),))))
    for knob, limit in (("model.max_model_len", max_model_len), ("engine.kv_cache_tokens", kv_cache_tokens)):
        if limit is not None and limit <= shortest:
            raise ConfigError(
                f"{knob}={limit} leaves no room for a reply: the shortest prompt of this model's chat template has "
                f"{shortest} tokens; raise it"
            )


class LearningLog:
    """What steps without learning had for a cause, shown as warnings by `show_line`."""

    def __init__(self, show_line: Callable[[str], None]) -> None:
        self._show_line = show_line
        self._causes: Counter[str] = Counter()
        self._num_steps = 0
        self._streak = 0
        self._has_sampled = False

    @property
    def has_learned(self) -> bool:
        """Whether any step taught something; True as long as there was none."""
        return self._num_steps == 0 or self._causes.total() < self._num_steps

    def add(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Look at a step; raises RolloutError when nothing was sampled or trained from the first step on."""
        cause = find_cause(metrics, groups)
        self._num_steps += 1
        self._has_sampled |= metrics["rollout/num_sampled_tokens"] > 0
        if cause is None:
            self._streak = 0
            return
        if not self._has_sampled and not metrics["train/num_updates"]:
            raise RolloutError(f"step {step} can teach the model nothing: {cause}")
        self._streak += 1
        self._causes[cause] += 1
        if self._causes[cause] == 1:
            self._show_line(f"warning: step {step} taught the model nothing: {cause}")
        elif self._streak in SHOWN_STREAKS:
            self._show_line(f"warning: the last {self._streak} steps taught the model nothing: {cause}")

    def close(self) -> None:
        """Say at the end how many steps taught nothing, and why."""
        if not self._causes:
            return
        num_idle, num_steps = self._causes.total(), self._num_steps
        listed = "; ".join(f"{count} x {cause}" for cause, count in self._causes.most_common())
        if num_idle == num_steps:
            self._show_line(f"warning: nothing was learned, the model is the one this run began with: {listed}")
        else:
            self._show_line(f"warning: {num_idle} of {num_steps} steps taught the model nothing: {listed}")


def find_cause(metrics: Mapping[str, float], groups: Sequence[Group]) -> str | None:
    """Why a step taught nothing; None where it did."""
    if not metrics["train/num_updates"]:
        return explain_no_update(metrics, groups)
    if metrics["train/grad_norm"] == 0:
        return "the gradient is zero" + (
            ": all rewards are 0" if metrics.get("rollout/reward_min") == metrics.get("rollout/reward_max") == 0 else ""
        )
    if metrics.get("train/changed_ratio") == 0:
        return (
            f"the update rounds to nothing at a learning rate of {metrics['train/learning_rate']:g}: raise "
            "trainer.learning_rate"
        )
    return None


def explain_no_update(metrics: Mapping[str, float], groups: Sequence[Group]) -> str:
    """Why no token was trained."""
    if not metrics["rollout/num_sampled_tokens"]:
        return explain_no_token(metrics)
    if not any(group.scored for group in groups):
        return "no rollout has a reward"
    if metrics["algorithm/num_trained_groups"]:
        return "no token of the rollouts is to be trained: look at experience.operators"
    if not metrics["algorithm/num_dropped_groups"]:
        return "experience.operators left out every group that has a reward"
    if metrics["rollout/reward_min"] == metrics["rollout/reward_max"]:
        cause = f"all rewards are {metrics['rollout/reward_min']:g}"
    else:
        cause = "the rewards within each group are equal"
    if all(is_uniform(group) for group in groups):
        return f"{cause}, for the rollouts of each group are equal token for token: raise model.temperature"
    return f"{cause}, so no rollout is better than another of its task: look at the judge, or at how hard the tasks are"


def explain_no_token(metrics: Mapping[str, float]) -> str:
    """Why no rollout has a sampled token."""
    if not metrics["rollout/num_turns"]:
        return "no rollout called the model"
    if metrics.get("rollout/num_stop_context"):
        return "no token was sampled, for prompts fill the context: raise model.max_model_len or engine.kv_cache_tokens"
    return "no token was sampled: every call of the model ended before its first token"


def is_uniform(group: Group) -> bool:
    """Whether all rollouts sampled the same tokens."""
    return len({tuple(turn.sampled_ids for turn in run.turns) for run in group.trajectories}) <= 1
