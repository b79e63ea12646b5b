"""A group whose rollouts have ended: whole, or a reference to the rank that has its tokens.

Most algorithms compute advantages from rewards alone. A rank then keeps the tokens of its groups and sends the first
rank references. The first rank decides with them who trains a group, and receives the tokens while the devices compute
the update.

A reference to a group of two rollouts, one of which failed, has two trajectories without task, texts and tokens:

    Trajectory(run_index=0, turns=(NO_TOKENS,) * 3, reward=1.0, metrics={"steps": 3.0}, ...)
    Trajectory(run_index=1, turns=(NO_TOKENS,), reward=None, failure=Failure(where="judge", message="no verdict"), ...)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tunesmith.experience.samples import chain_turns, count_shared, read_array
from tunesmith.types import Distribution, Group, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCost:
    """Size of the trie of a group's samples."""

    num_tokens: int
    """Nodes: shared prefixes are counted once."""
    num_pairs: int
    """Pairs of a node and an ancestor, or itself."""


def measure_group(group: Group) -> PathCost:
    """Size of the trie over all trajectories of a group."""
    lasts = [run.turns[chain[-1]] for run in group.trajectories for chain in chain_turns(run.turns)]
    num_tokens, num_pairs = 0, 0
    previous = np.zeros(0, dtype=np.int64)
    for path in sorted((turn.prompt_ids + turn.sampled_ids)[:-1] for turn in lasts):
        tokens = read_array(path, np.int64)
        num_shared = count_shared(previous, tokens)
        num_tokens += len(tokens) - num_shared
        num_pairs += len(tokens) * (len(tokens) + 1) // 2 - num_shared * (num_shared + 1) // 2
        previous = tokens
    return PathCost(num_tokens=num_tokens, num_pairs=num_pairs)


def drop_routes(run: Trajectory) -> Trajectory:
    """The trajectory without routes, which only training needs."""
    if all(turn.routes is None for turn in run.turns):
        return run
    return replace(run, turns=tuple(turn if turn.routes is None else replace(turn, routes=None) for turn in run.turns))


NO_TASK = Task(task_id="", index=0, row={})
"""In a reference: the first rank knows the task."""
NO_TOKENS = Turn(
    prompt_ids=(), sampled_ids=(), logprobs=(), policy_versions=(), distribution=Distribution(), stop_reason="cancelled"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group that no step has trained yet."""

    number: int
    """Groups that the run started before it."""
    group: Group
    has_tokens: bool = True
    """False: the turns of `group` are `NO_TOKENS`, and `rank` has the others."""
    rank: int = 0
    """The rank that has the tokens."""
    cost: PathCost | None = None
    """Work of training the group, if another rank measured it."""

    def complete(self, whole: Group) -> Group:
        """The group with its tokens, and with the baseline reward that only the first rank knows."""
        return replace(whole, baseline_reward=self.group.baseline_reward)


def build_reference(group: Group) -> Group:
    """The reference to a group that stays on this rank: without task and texts, and as many turns without tokens."""
    return Group(
        task=NO_TASK,
        trajectories=tuple(
            Trajectory(
                task=NO_TASK,
                run_index=run.run_index,
                turns=(NO_TOKENS,) * len(run.turns),
                reward=run.reward,
                metrics=run.metrics,
                failure=run.failure,
            )
            for run in group.trajectories
        ),
    )
