"""Group-in-group advantages (GiGPO): one advantage per turn, at the level of episodes and of steps.

A = A_E + omega A_S for each turn (Feng et al., 2025, "Group-in-group policy optimization", eqs. 3, 7 and 8). A_E
compares the rollout's return with those of the other rollouts of its task. A_S compares the discounted return from this
turn on with those of all turns, of rollouts of the same task, in the same state (the anchor state).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome, spread_scored, standardize, subtract_mean
from tunesmith.errors import ConfigError
from tunesmith.types import are_equal


def compute_gigpo_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    omega: NonNegativeFloat = 1.0,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95,
    fnorm: Literal["std", "none"] = "none",
    epsilon: PositiveFloat = 1e-6,
    step_reward_key: str | None = None,
    env_state_hash_key: str | None = None,
) -> Advantages:
    """One advantage per turn; a group in which all of them are 0 is dropped.

    `fnorm="std"` divides both parts by the standard deviation of the values compared. Without `step_reward_key` the
    rollout's reward is that of its last turn; with it, the reward of turn t is the rollout's metric
    `<step_reward_key>/<t>`, 0 if not reported, and their sum replaces the rollout's reward. Without
    `env_state_hash_key` two turns are in the same state if their prompts have the same token ids; with it, if their
    metrics `<env_state_hash_key>/<t>` are equal.
    """
    advantages: Advantages = []
    for group in groups:
        runs = [run for run in group if run.reward is not None]
        rewards = [_list_rewards(run, step_reward_key) for run in runs]
        states = [_list_states(run, env_state_hash_key) for run in runs]
        totals = [math.fsum(each) for each in rewards] if step_reward_key else [run.reward or 0.0 for run in runs]
        run_advantages = _normalize(totals, fnorm, epsilon)
        turn_advantages = _compute_turn_advantages([_discount(each, gamma) for each in rewards], states, fnorm, epsilon)
        rows = [
            tuple(of_run + omega * of_turn for of_turn in turns)
            for of_run, turns in zip(run_advantages, turn_advantages, strict=True)
        ]
        has_nonzero = any(value for row in rows for value in row)
        advantages.append(list(spread_scored(group, rows)) if has_nonzero else [None] * len(group))
    return advantages


def _list_rewards(run: RunOutcome, key: str | None) -> list[float]:
    assert run.reward is not None
    if key is not None:
        return [run.metrics.get(f"{key}/{turn}", 0.0) for turn in range(run.num_turns)]
    return [0.0] * (run.num_turns - 1) + [run.reward] * min(run.num_turns, 1)


def _list_states(run: RunOutcome, key: str | None) -> list[Hashable]:
    if key is None:
        return list(run.turn_prompts)
    names = [f"{key}/{turn}" for turn in range(run.num_turns)]
    missing = [name for name in names if name not in run.metrics]
    if missing:
        raise ConfigError(
            f"env_state_hash_key={key!r}: a rollout does not report the metric {missing[0]!r}; report it for every "
            "model call, or leave env_state_hash_key out to compare prompts"
        )
    return [run.metrics[name] for name in names]


def _discount(rewards: Sequence[float], gamma: float) -> list[float]:
    """R_t = r_t + gamma R_{t+1}."""
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def _compute_turn_advantages(
    returns: Sequence[Sequence[float]], states: Sequence[Sequence[Hashable]], fnorm: str, epsilon: float
) -> list[list[float]]:
    """Each turn's return relative to those of all turns in its state; 0 if it is the only one."""
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for run, of_run in enumerate(states):
        for turn, state in enumerate(of_run):
            members.setdefault(state, []).append((run, turn))
    compared = [[0.0] * len(of_run) for of_run in returns]
    for places in members.values():
        values = _normalize([returns[run][turn] for run, turn in places], fnorm, epsilon)
        for (run, turn), value in zip(places, values, strict=True):
            compared[run][turn] = value
    return compared


def _normalize(values: Sequence[float], fnorm: str, epsilon: float) -> list[float]:
    """(x - mean) / (scale + epsilon), scale the sample std or 1; exact zeros if all values are equal."""
    if are_equal(values):
        return [0.0] * len(values)
    if fnorm == "std":
        return standardize(values, epsilon=epsilon)
    return [value / (1.0 + epsilon) for value in subtract_mean(values)]
