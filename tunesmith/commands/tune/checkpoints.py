"""Restore the checkpoints of a training run, and save what stands beside them.

A step's files are written before the checkpoint that commits it, so an interrupted run resumes from its last commit and
reproduces the same metrics.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.cluster.ranks import Ranks
from tunesmith.errors import StorageError
from tunesmith.experience.step_files import JSON_STEPS, StepFiles
from tunesmith.experience.store import ROLLOUT_STEPS, load_rollouts, save_rollouts
from tunesmith.loop import StepParts
from tunesmith.model.checkpoint import estimate_checkpoint_bytes, load_checkpoint, load_model_state, load_states
from tunesmith.runs.policy import Policy
from tunesmith.runs.run_folder import RunFolder, describe_recovery
from tunesmith.storage import RunPaths, remove_tree, renamed_folder
from tunesmith.trainer.sharding.sharded_model import find_sharding, load_state
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Group, Trajectory

logger = logging.getLogger(__name__)


def restore(folder: RunFolder, policy: Policy, parts: StepParts) -> tuple[int, list[int]]:
    """Restore model, trainer, selector and replay buffer from the last checkpoint; return its step, 0 if there is none,
    and the steps whose checkpoints the next one replaces."""
    if folder.checkpoint is None:
        return 0, []
    try:
        run_state = restore_models(folder.checkpoint, policy, parts.trainer.trainer)
    except StorageError as error:
        raise StorageError(f"{error}; {describe_recovery(folder.paths, before=folder.checkpoint)}") from error
    parts.tasks.selector.load_state_dict(run_state["selector"])
    parts.dispatcher.load_state_dict(run_state)
    parts.replay.load_state_dict(run_state["replay"], lambda step: load_rollouts(folder.paths.rollouts(step)))
    return int(run_state["step"]), run_state.get("timed_steps", [])  # earlier versions wrote none


def restore_models(checkpoint: Path, policy: Policy, trainer: Trainer) -> dict[str, Any]:
    """Restore model and trainer, on every rank; return the state of the run.

    Of a model that is sharded over ranks, the first one reads the weights, and each its parts of the optimizer's state.
    """
    model = policy.model
    if (sharding := find_sharding(model)) is None:
        state = load_checkpoint(checkpoint, model)
    else:
        load_state(model, load_model_state(checkpoint, model, dtype=sharding.dtype) if sharding.ranks.is_first else {})
        state = load_states(checkpoint, is_mapped=True)
    trainer.load_state_dict(state.trainer_state)
    return state.run_state


def save_tokenizer(policy: Policy, paths: RunPaths) -> None:
    """Save the policy's tokenizer beside the rollouts, which then can be read as text from the first step on."""
    if paths.tokenizer.is_dir():
        remove_tree(paths.tokenizer)
    with renamed_folder(paths.tokenizer) as folder:
        policy.tokenizer.save_pretrained(folder)


def count_checkpoint_bytes(policy: Policy, trainer: Trainer, ranks: Ranks) -> int:
    """Approximate size of a checkpoint; on several ranks the optimizer's state is not gathered for it."""
    if ranks.is_alone:
        return estimate_checkpoint_bytes(policy.model, trainer.state_dict())
    if find_sharding(policy.model) is not None:
        return int(policy.model.num_parameters() * policy.model.dtype.itemsize) + trainer.count_state_bytes()
    return estimate_checkpoint_bytes(policy.model, {}) + trainer.count_state_bytes()


def merge_steps(paths: RunPaths, *, committed_step: int, steps_per_file: int) -> None:
    """Merge per-step files to bound their number; files that cannot be read or written stay per step."""
    for any_step, form in ((paths.rollouts(0), ROLLOUT_STEPS), (paths.selection(0), JSON_STEPS)):
        try:
            StepFiles(any_step.parent, form).merge(committed_step=committed_step, steps_per_file=steps_per_file)
        except StorageError as error:
            logger.warning("files of steps were not merged: %s", error)


def save_unfinished(path: Path, finished: Sequence[Trajectory]) -> None:
    """Save the trajectories that a failed step had finished, unless its groups are saved.

    A step may repeat a task: the second rollout of an index is that of another group.
    """
    found: dict[tuple[str, int], list[Trajectory]] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for trajectory in finished:
        task_id = trajectory.task.task_id
        found.setdefault((task_id, counts[task_id, trajectory.run_index]), []).append(trajectory)
        counts[task_id, trajectory.run_index] += 1
    if found and not path.exists():
        save_rollouts(path, [Group(task=runs[0].task, trajectories=tuple(runs)) for runs in found.values()])
