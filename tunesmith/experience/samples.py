"""Merge recorded turns into samples.

A turn extends an earlier one when its prompt begins with that turn's prompt and sampled tokens, token for token. Turns
that extend each other become one sample. When several turns extend the same turn, the first continues its sample and
each other starts a new sample in which the shared tokens are context. So every sampled token of a trajectory that
trains is trained exactly once, and no other token is. Turns that an operator excluded from training stay as context.
Only token ids are compared, never text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from tunesmith.types import DistributionSpan, Group, RunAdvantage, Sample, Trajectory, Turn


def build_samples(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[RunAdvantage]],
    *,
    has_hard_credit: bool = False,
    places: Sequence[tuple[int, int]] | None = None,
) -> tuple[list[Sample], dict[str, float]]:
    """Samples of every trajectory that has an advantage, in order, and their counts as metrics.

    `places` are the index of each group in the batch and of its first trajectory; None: the groups are the batch.
    An advantage is one number for the trajectory, or a tuple with one number per turn.
    With hard credit, a turn that several branching rollouts share is trained once.
    `rollout/num_branches` counts samples beyond the first of each trajectory: retries, sub-agents, edited histories.
    """
    samples: list[Sample] = []
    num_trained, num_branches, trajectory_index = 0, 0, 0
    for index, (group, row) in enumerate(zip(groups, advantages, strict=True)):
        group_index, trajectory_index = (index, trajectory_index) if places is None else places[index]
        runs, values = share_credit(group.trajectories, row) if has_hard_credit else (group.trajectories, row)
        for trajectory, advantage in zip(runs, values, strict=True):
            if advantage is not None:
                chains = [chain for chain in chain_turns(trajectory.turns) if any(turn.is_trained for turn in chain)]
                advantage_of = _expand_advantage(trajectory, advantage)
                samples += [_merge_turns(chain, advantage_of, group_index, trajectory_index) for chain in chains]
                num_trained += 1
                num_branches += max(len(chains) - 1, 0)
            trajectory_index += 1
    metrics = {
        "rollout/num_trained_trajectories": float(num_trained),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_branches": float(num_branches),
    }
    return samples, metrics


def share_credit(
    trajectories: Sequence[Trajectory], advantages: Sequence[RunAdvantage]
) -> tuple[list[Trajectory], list[RunAdvantage]]:
    """Trajectories and advantages of one group with hard credit (ARPO, Dong et al., 2025, section 3.2).

    A turn that several branching rollouts share has the mean of their advantages and is trained once, by the first of
    them; in the others it is context. Turns of a single rollout keep its advantage. Rollouts without an advantage, and
    turns that an operator excluded, do not count. Soft credit needs no function: every rollout trains all of its turns,
    so a shared token is trained once per rollout, and its summed gradient is the number of rollouts times that of the
    mean advantage.
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


def chain_turns(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Split turns into chains in which each turn extends the one before; turns without sampled tokens are skipped.

    A turn is appended to the chain with the longest last turn among those that it extends.
    """
    chains: list[list[Turn]] = []
    for turn in turns:
        if not turn.sampled_ids:
            continue
        open_chains = [chain for chain in chains if _extends(turn, chain[-1])]
        if open_chains:
            max(open_chains, key=lambda chain: len(chain[-1].prompt_ids) + len(chain[-1].sampled_ids)).append(turn)
        else:
            chains.append([turn])
    return chains


def _extends(turn: Turn, earlier: Turn) -> bool:
    num_prompt, num_tokens = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.sampled_ids)
    return (
        len(turn.prompt_ids) >= num_tokens
        and turn.prompt_ids[num_prompt:num_tokens] == earlier.sampled_ids
        and turn.prompt_ids[:num_prompt] == earlier.prompt_ids
    )


def _expand_advantage(trajectory: Trajectory, advantage: float | tuple[float, ...]) -> dict[int, float]:
    """The advantage of each turn, keyed by `id(turn)`."""
    num_turns = len(trajectory.turns)
    values = advantage if isinstance(advantage, tuple) else (advantage,) * num_turns
    return {id(turn): value for turn, value in zip(trajectory.turns, values, strict=True)}


def _merge_turns(
    chain: Sequence[Turn], advantage_of: dict[int, float], group_index: int, trajectory_index: int
) -> Sample:
    """One sample with the tokens of the last turn; the tokens sampled by each trained turn of the chain are trained."""
    last = chain[-1]
    token_ids = last.prompt_ids + last.sampled_ids
    is_sampled = [False] * len(token_ids)
    logprobs, advantages = [0.0] * len(token_ids), [0.0] * len(token_ids)
    policy_versions: list[int | None] = [None] * len(token_ids)
    spans: list[DistributionSpan] = []
    for turn in chain:
        if not turn.is_trained:
            continue
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
        is_sampled[start:end] = [True] * (end - start)
        logprobs[start:end] = turn.logprobs
        advantages[start:end] = [advantage_of[id(turn)]] * (end - start)
        policy_versions[start:end] = turn.policy_versions
        spans.append(DistributionSpan(start=start, end=end, distribution=turn.distribution))
    return Sample(
        token_ids=token_ids,
        is_sampled=tuple(is_sampled),
        logprobs=tuple(logprobs),
        advantages=tuple(advantages),
        policy_versions=tuple(policy_versions),
        distribution_spans=tuple(spans),
        group_index=group_index,
        trajectory_index=trajectory_index,
    )
