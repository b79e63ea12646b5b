"""Hard credit on the trees of branching rollouts (ARPO, Dong et al., 2025, section 3.2).

A turn that several rollouts share has the mean of their advantages and is trained once, by the first of them; in the
others it is context. Turns of a single rollout keep its advantage. Soft credit needs no function: every rollout trains
all of its turns, so a shared token is trained once per rollout, and its summed gradient is the number of rollouts times
that of the mean advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from tunesmith.types import RunAdvantage, Trajectory


def share_credit(
    trajectories: Sequence[Trajectory], advantages: Sequence[RunAdvantage]
) -> tuple[list[Trajectory], list[RunAdvantage]]:
    """Trajectories and advantages of one group with hard credit: one advantage per turn where turns are shared.

    Rollouts without an advantage, and turns that an operator excluded, do not count.
    """
    if all(run.parent is None for run in trajectories):
        return list(trajectories), list(advantages)
    owners = [
        list(enumerate(run.turn_owners + (run.run_index,) * (len(run.turns) - run.num_shared_turns)))
        for run in trajectories
    ]
    values: dict[tuple[int, int], list[float]] = {}
    trainers: dict[tuple[int, int], int] = {}
    for run, advantage, keys in zip(trajectories, advantages, owners, strict=True):
        if advantage is None:
            continue
        per_turn = advantage if isinstance(advantage, tuple) else (advantage,) * len(run.turns)
        for turn, value, key in zip(run.turns, per_turn, keys, strict=True):
            if turn.is_trained:
                values.setdefault(key, []).append(value)
                trainers.setdefault(key, run.run_index)
    shared_runs: list[Trajectory] = []
    shared_advantages: list[RunAdvantage] = []
    for run, advantage, keys in zip(trajectories, advantages, owners, strict=True):
        turns = tuple(
            turn if trainers.get(key) in (None, run.run_index) else replace(turn, is_trained=False)
            for turn, key in zip(run.turns, keys, strict=True)
        )
        shared_runs.append(replace(run, turns=turns))
        shared_advantages.append(None if advantage is None else tuple(fmean(values.get(key, (0.0,))) for key in keys))
    return shared_runs, shared_advantages
