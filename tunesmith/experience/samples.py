"""Merge recorded turns into samples, and samples into a trie.

A turn extends an earlier one when its prompt begins with that turn's prompt and sampled tokens, token for token. Turns
that extend each other become one sample. When several turns extend the same turn, the first continues its sample and
each other starts a new sample in which the shared tokens are context. So every sampled token of a trajectory that
trains is trained exactly once, and no other token is. Turns that an operator excluded from training stay as context.
Only token ids are compared, never text.

A trie is flat arrays, in which shared prefixes are stored once. Nodes are in depth-first order, so a subtree is a
range: node k is an ancestor of node q, or q itself, exactly when k <= q < subtree_end[k], and a node's depth is its
position in every sample that contains it. An event is a sampled token of one sample, predicted by the node before it.
Samples that sampled the same token in the same context share nodes but have one event each, with its own advantage. A
sample's last sampled token predicts nothing, so it and the tokens after it have no node.

Axes: T nodes, E events.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean

import numpy as np

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
                turns, indices = trajectory.turns, (group_index, trajectory_index)
                chains = [chain for chain in chain_turns(turns) if any(turns[index].is_trained for index in chain)]
                turn_advantages = advantage if isinstance(advantage, tuple) else (advantage,) * len(turns)
                steps = list(zip(turns, turn_advantages, strict=True))
                samples += [_merge_turns([steps[index] for index in chain], turns, indices) for chain in chains]
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


def chain_turns(turns: Sequence[Turn]) -> list[list[int]]:
    """Indices of turns, as chains in which each extends the one before; turns without sampled tokens are skipped.

    A turn is appended to the chain with the longest last turn among those that it extends.
    """
    chains: list[list[int]] = []
    sizes = [len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns]
    for index, turn in enumerate(turns):
        if not turn.sampled_ids:
            continue
        open_chains = [chain for chain in chains if extends(turn.prompt_ids, turns[chain[-1]])]
        if open_chains:
            max(open_chains, key=lambda chain: sizes[chain[-1]]).append(index)
        else:
            chains.append([index])
    return chains


def extends(prompt_ids: tuple[int, ...], turn: Turn) -> bool:
    """Whether a prompt begins with all tokens of a turn."""
    num_prompt, num_tokens = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
    return prompt_ids[num_prompt:num_tokens] == turn.sampled_ids and prompt_ids[:num_prompt] == turn.prompt_ids


def _merge_turns(chain: Sequence[tuple[Turn, float]], turns: Sequence[Turn], indices: tuple[int, int]) -> Sample:
    """One sample with the tokens of the last turn; the tokens sampled by each trained turn of the chain are trained."""
    last, _ = chain[-1]
    token_ids = last.prompt_ids + last.sampled_ids
    is_sampled = [False] * len(token_ids)
    logprobs, advantages = [0.0] * len(token_ids), [0.0] * len(token_ids)
    policy_versions: list[int | None] = [None] * len(token_ids)
    spans: list[DistributionSpan] = []
    for turn, advantage in chain:
        if not turn.is_trained:
            continue
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
        is_sampled[start:end] = [True] * (end - start)
        logprobs[start:end] = turn.logprobs
        advantages[start:end] = [advantage] * (end - start)
        policy_versions[start:end] = turn.policy_versions
        spans.append(DistributionSpan(start=start, end=end, distribution=turn.distribution))
    return Sample(
        token_ids=token_ids,
        is_sampled=tuple(is_sampled),
        logprobs=tuple(logprobs),
        advantages=tuple(advantages),
        policy_versions=tuple(policy_versions),
        distribution_spans=tuple(spans),
        group_index=indices[0],
        trajectory_index=indices[1],
        routes=_merge_routes(turns, last),
    )


def _merge_routes(turns: Sequence[Turn], last: Turn) -> np.ndarray | None:
    """The routes of all tokens of a turn, those of earlier turns as they were when these were sampled."""
    found = [turn for turn in turns if turn.routes is not None and (turn is last or extends(last.prompt_ids, turn))]
    if not found:
        return None
    shape, first = (len(last.prompt_ids) + len(last.sampled_ids), *found[0].routes.shape[1:]), 0
    routes_NLK = np.full(shape, -1, dtype=found[0].routes.dtype)
    for turn in sorted(found, key=lambda turn: len(turn.prompt_ids)):
        end = len(turn.prompt_ids) + len(turn.sampled_ids) - 1
        first = max(first, end - len(turn.routes))
        if first < end:
            routes_NLK[first:end], first = turn.routes[first - end :], end
    return routes_NLK


EMPTY = np.zeros(0, dtype=np.int64)
STRUCT_CODES: dict[type, str] = {bool: "?", np.int64: "q", np.float64: "d"}
"""Numpy type -> format character of `struct`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """A trie with one root, or several concatenated ones."""

    token_ids_T: np.ndarray
    depth_T: np.ndarray
    subtree_end_T: np.ndarray
    """One past the last node of each node's subtree."""
    parent_E: np.ndarray
    """The node that predicts the event's token."""
    target_E: np.ndarray
    """The token that was sampled."""
    sample_E: np.ndarray
    """Index of the event's sample in the batch."""
    time_E: np.ndarray
    """Position of the event's token in its sample."""
    num_flat_tokens: int
    """Number of nodes without prefix sharing."""
    owner_T: np.ndarray = field(default_factory=lambda: EMPTY)
    """The sample that each node was made for, the first of those that share it."""

    def __post_init__(self) -> None:
        assert len(self.token_ids_T) == len(self.depth_T) == len(self.subtree_end_T)
        assert len(self.parent_E) == len(self.target_E) == len(self.sample_E) == len(self.time_E)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)


def build_trie(samples: Sequence[Sample], indices: Sequence[int]) -> Trie:
    """The trie over `samples[i]` for i in `indices`; samples without trained tokens have no node.

    Paths are inserted in lexicographic order of their token ids, so the longest shared prefix of each path is shared
    with the one inserted before it.
    """
    times = {index: np.flatnonzero(read_array(samples[index].is_sampled, bool)) for index in indices}
    # the tokens needed to predict a sample's events: all before its last sampled token
    paths = {index: samples[index].token_ids[: time_N[-1] if len(time_N) else 0] for index, time_N in times.items()}
    nodes_of_sample: dict[int, np.ndarray] = {}
    token_parts, depth_parts, owner_parts, closings = [], [], [], []
    num_nodes = 0
    tokens, nodes = EMPTY, EMPTY
    for index in sorted((index for index in indices if paths[index]), key=lambda index: paths[index]):
        previous, tokens = tokens, read_array(paths[index], np.int64)
        num_shared = count_shared(previous, tokens)
        num_new = len(tokens) - num_shared
        closings.append((nodes[num_shared:], num_nodes))
        nodes = np.concatenate([nodes[:num_shared], np.arange(num_nodes, num_nodes + num_new)])
        nodes_of_sample[index] = nodes
        token_parts.append(tokens[num_shared:])
        depth_parts.append(np.arange(num_shared, len(tokens)))
        owner_parts.append(np.full(num_new, index))
        num_nodes += num_new
    closings.append((nodes, num_nodes))
    subtree_end_T = np.zeros(num_nodes, dtype=np.int64)
    for closed, end in closings:
        subtree_end_T[closed] = end
    return Trie(
        token_ids_T=_concatenate(token_parts),
        depth_T=_concatenate(depth_parts),
        subtree_end_T=subtree_end_T,
        num_flat_tokens=sum(len(path) for path in paths.values()),
        owner_T=_concatenate(owner_parts),
        **_build_events(samples, nodes_of_sample, times),
    )


def concatenate_tries(tries: Sequence[Trie]) -> Trie:
    """Tries laid end to end as one."""
    starts = np.cumsum([0, *(trie.num_tokens for trie in tries)])[:-1].tolist()
    shifted = [
        replace(trie, subtree_end_T=trie.subtree_end_T + start, parent_E=trie.parent_E + start)
        for trie, start in zip(tries, starts, strict=True)
    ]
    names = [each.name for each in fields(Trie) if each.name != "num_flat_tokens"]
    arrays = {name: _concatenate([getattr(trie, name) for trie in shifted]) for name in names}
    return Trie(num_flat_tokens=sum(trie.num_flat_tokens for trie in tries), **arrays)


def read_array(values: Sequence[float | None] | np.ndarray, dtype: type) -> np.ndarray:
    """The values as a read-only array; None is NaN.

    `struct.pack` converts a sequence of Python numbers three times as fast as numpy.
    """
    if isinstance(values, np.ndarray):
        return np.asarray(values, dtype=dtype)
    if len(values) == 0:
        return np.empty(0, dtype=dtype)
    try:
        return np.frombuffer(struct.pack(f"{len(values)}{STRUCT_CODES[dtype]}", *values), dtype=dtype)
    except struct.error:  # a None
        return np.fromiter(values, dtype=dtype, count=len(values))


def count_shared(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _build_events(
    samples: Sequence[Sample], nodes_of_sample: dict[int, np.ndarray], times_of_sample: dict[int, np.ndarray]
) -> dict[str, np.ndarray]:
    """Events ordered by sample, then time."""
    parents, targets, sample_indices, times = [], [], [], []
    for index in sorted(nodes_of_sample):
        time_N, token_ids = times_of_sample[index], samples[index].token_ids
        parents.append(nodes_of_sample[index][time_N - 1])
        first = int(time_N[0])
        targets.append(read_array(token_ids[first:], np.int64)[time_N - first])
        sample_indices.append(np.full(len(time_N), index, dtype=np.int64))
        times.append(time_N)
    return {
        "parent_E": _concatenate(parents),
        "target_E": _concatenate(targets),
        "sample_E": _concatenate(sample_indices),
        "time_E": _concatenate(times),
    }


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else EMPTY
