"""Group-in-group advantages: runs compared with runs, and turns with other turns taken in the same state.

A = A_E + omega A_S for each turn (Feng et al., 2025, "Group-in-group policy optimization", eqs. 3, 7 and 8). A_E is how
much better the run did than the runs of its task. A_S is how much better things went from this turn on than from the
other turns, of runs of the same task, in which the agent was in the same state.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome
from tunesmith.errors import ConfigError


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

    `fnorm="std"` divides both parts by the deviation of what is compared. Without `step_reward_key` a run's reward
    comes with its last turn; with it, turn t's reward is the run's metric `<step_reward_key>/<t>`, 0 where that is not
    reported, and the sum of them stands for the run's reward. Without `env_state_hash_key` turns whose prompts have the
    same tokens are in the same state; with it, turns whose metrics `<env_state_hash_key>/<t>` are equal.
    """
    advantages: Advantages = []
    for group in groups:
        runs = [run for run in group if run.reward is not None]
        rewards = [_list_rewards(run, step_reward_key) for run in runs]
        states = [_list_states(run, env_state_hash_key) for run in runs]
        totals = [math.fsum(each) for each in rewards] if step_reward_key else [run.reward or 0.0 for run in runs]
        of_runs = _compare(totals, fnorm, epsilon)
        of_turns = _compare_turns([_discount(each, gamma) for each in rewards], states, fnorm, epsilon)
        rows = [
            tuple(of_run + omega * of_turn for of_turn in turns)
            for of_run, turns in zip(of_runs, of_turns, strict=True)
        ]
        teaches = any(value for row in rows for value in row)
        found = iter(rows)
        values = [None if run.reward is None else next(found) for run in group]
        advantages.append(list(values) if teaches else [None] * len(group))
    return advantages


def _list_rewards(run: RunOutcome, key: str | None) -> list[float]:
    assert run.reward is not None
    if key is not None:
        return [run.metrics.get(f"{key}/{turn}", 0.0) for turn in range(run.num_steps)]
    return [0.0] * (run.num_steps - 1) + [run.reward] * min(run.num_steps, 1)


def _list_states(run: RunOutcome, key: str | None) -> list[Hashable]:
    if key is None:
        return list(run.turn_prompts)
    names = [f"{key}/{turn}" for turn in range(run.num_steps)]
    missing = [name for name in names if name not in run.metrics]
    if missing:
        raise ConfigError(
            f"env_state_hash_key={key!r}: a run reports no metric {missing[0]!r}; report one for every model call, or "
            "leave the key out to compare prompts"
        )
    return [run.metrics[name] for name in names]


def _discount(rewards: Sequence[float], gamma: float) -> list[float]:
    """R_t = r_t + gamma R_{t+1}."""
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def _compare_turns(
    returns: Sequence[Sequence[float]], states: Sequence[Sequence[Hashable]], fnorm: str, epsilon: float
) -> list[list[float]]:
    """Each turn's return against those of the other turns in its state; 0 where there is no other."""
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for run, of_run in enumerate(states):
        for turn, state in enumerate(of_run):
            members.setdefault(state, []).append((run, turn))
    compared = [[0.0] * len(of_run) for of_run in returns]
    for places in members.values():
        values = _compare([returns[run][turn] for run, turn in places], fnorm, epsilon)
        for (run, turn), value in zip(places, values, strict=True):
            compared[run][turn] = value
    return compared


def _compare(values: Sequence[float], fnorm: str, epsilon: float) -> list[float]:
    """(x - mean) / (std or 1, + epsilon), one degree of freedom taken off; exact zeros where all are alike."""
    if len(set(values)) <= 1:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    scale = (std if fnorm == "std" else 1.0) + epsilon
    return [(value - mean) / scale for value in values]
