"""Detect steps that leave the weights unchanged, and report the reason on the console.

Settings under which no step can change the weights are refused before the first step. Causes found during the run:
equal rewards in every group (zero advantage), no sampled token, a zero gradient, and an update that rounds to zero.
Each cause is reported when it first occurs and again in a summary at the end. Not every update is compared with the
weights before it, so the weights at the end of a run are also compared with those at its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.chat.messages import Message
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.config import ModelSection, TrainerSection
from tunesmith.errors import ConfigError, RolloutError
from tunesmith.types import Group, are_equal

SHOWN_STREAKS = frozenset(10**power for power in range(1, 7))
"""Numbers of consecutive unchanged steps at which the warning is repeated."""


def check_sampling_is_random(model: ModelSection, algorithm: Algorithm) -> None:
    """Refuse a group-relative algorithm with greedy sampling, where all rollouts of a group are identical."""
    if not algorithm.is_group_relative or "experts" in algorithm.needs:
        return
    for knob, value, is_greedy in (
        ("temperature", model.temperature, model.temperature == 0),
        ("top_k", model.top_k, model.top_k == 1),
    ):
        if is_greedy:
            raise ConfigError(
                f"model.{knob}={value} samples the same tokens in all rollouts of a task, and {algorithm.name!r} needs "
                f"rollouts that differ: raise model.{knob}"
            )


def check_reply_fits(renderer: Renderer, *, max_model_len: int, kv_cache_tokens: int | None) -> None:
    """Raise if the context or the KV cache cannot hold the shortest prompt and one token of a reply."""
    shortest = len(renderer.render(Prompt(messages=(Message(role="user", content="?"),))))
    for knob, limit in (("model.max_model_len", max_model_len), ("engine.kv_cache_tokens", kv_cache_tokens)):
        if limit is not None and limit <= shortest:
            raise ConfigError(
                f"{knob}={limit} is too small for a reply: the shortest prompt of this model's chat template has "
                f"{shortest} tokens; raise it"
            )


class UpdateLog:
    """Counts the causes of steps that left the weights unchanged; `show_line` prints the warnings."""

    def __init__(self, show_line: Callable[[str], None], trainer: TrainerSection = TrainerSection()) -> None:
        self._show_line = show_line
        self._trainer = trainer
        self._causes: Counter[str] = Counter()
        self._num_steps = 0
        self._streak = 0

    @property
    def has_changed_weights(self) -> bool:
        """Whether any step changed the weights; True before the first step."""
        return self._num_steps == 0 or self._causes.total() < self._num_steps

    def add(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Check a step; raises RolloutError if the run's first one sampled no token and made no update."""
        cause = find_cause(metrics, groups, self._trainer)
        self._num_steps += 1
        if cause is None:
            self._streak = 0
            return
        # by the number of the step, so that a resumed run raises where the whole one does
        if step == 1 and not metrics["rollout/num_sampled_tokens"] and not metrics["train/num_updates"]:
            raise RolloutError(f"step {step} sampled nothing to train on: {cause}")
        self._streak += 1
        self._causes[cause] += 1
        if self._causes[cause] == 1:
            self._show_line(f"warning: step {step} changed nothing: {cause}")
        elif self._streak in SHOWN_STREAKS:
            self._show_line(f"warning: the last {self._streak} steps changed nothing: {cause}")

    def close(self, *, has_new_weights: bool = True) -> None:
        """Print how many steps changed nothing, and why; all of them without new weights."""
        if not has_new_weights and self._causes.total() < self._num_steps:
            self._causes[explain_rounding(self._trainer)] += self._num_steps - self._causes.total()
        if not self._causes:
            return
        num_unchanged, num_steps = self._causes.total(), self._num_steps
        listed = "; ".join(f"{count} x {cause}" for cause, count in self._causes.most_common())
        if num_unchanged == num_steps:
            self._show_line(
                f"warning: no step changed the weights; the model is the one that the run started from: {listed}"
            )
        else:
            self._show_line(f"warning: {num_unchanged} of {num_steps} steps changed nothing: {listed}")


def find_cause(
    metrics: Mapping[str, float], groups: Sequence[Group], trainer: TrainerSection = TrainerSection()
) -> str | None:
    """Why a step left the weights unchanged; None if it changed them."""
    if not metrics["train/num_updates"]:
        return explain_no_update(metrics, groups)
    if metrics["train/grad_norm"] == 0:
        return "the gradient is zero" + (
            ": all rewards are 0" if metrics.get("rollout/reward_min") == metrics.get("rollout/reward_max") == 0 else ""
        )
    if metrics.get("train/changed_ratio") == 0:
        return explain_rounding(trainer, metrics["train/learning_rate"])
    return None


def explain_rounding(trainer: TrainerSection, learning_rate: float | None = None) -> str:
    """Why updates leave the weights as they are; AdamW divides a gradient below its epsilon by that."""
    if trainer.max_grad_norm < trainer.epsilon:
        return f"the update rounds to zero at trainer.max_grad_norm={trainer.max_grad_norm:g}: raise it"
    rate = trainer.peak_learning_rate if learning_rate is None else learning_rate
    return f"the update rounds to zero at learning rate {rate:g}: raise trainer.learning_rate"


def explain_no_update(metrics: Mapping[str, float], groups: Sequence[Group]) -> str:
    """Why a step made no update."""
    if not metrics["rollout/num_sampled_tokens"]:
        return explain_no_token(metrics)
    if not any(group.scored for group in groups):
        return "no rollout has a reward"
    if metrics["algorithm/num_trained_groups"]:
        return "experience.operators exclude every token from training"
    if not metrics["algorithm/num_dropped_groups"]:
        return "experience.operators removed every group that has a reward"
    if are_equal([metrics["rollout/reward_min"], metrics["rollout/reward_max"]]):
        cause = f"all rewards are {metrics['rollout/reward_min']:g}"
    else:
        cause = "the rewards within each group are equal"
    sampled = [{tuple(turn.sampled_ids for turn in run.turns) for run in group.trajectories} for group in groups]
    if all(len(different) <= 1 for different in sampled):
        return (
            f"{cause}: all rollouts of a group sampled the same tokens; if the reward is not the highest one, raise "
            "model.temperature, else take harder tasks"
        )
    return f"{cause}, so all advantages are zero: check the judge and the difficulty of the tasks"


def explain_no_token(metrics: Mapping[str, float]) -> str:
    """Why no token was sampled."""
    if metrics.get("rollout/num_overlong"):
        return (
            "no token was sampled because prompts fill the context: raise model.max_model_len or engine.kv_cache_tokens"
        )
    if not metrics["rollout/num_turns"]:
        return "no rollout called the model"
    return "no token was sampled: every model call ended before its first token"
