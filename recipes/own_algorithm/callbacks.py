"""Functions that are called during the run, named in config.yaml."""

from __future__ import annotations

import shutil

from tunesmith import CheckpointEnd, StepEnd, Stop


def stop_if_silent(record: StepEnd) -> Stop | None:
    """End a run whose agent has stopped answering."""
    lengths = [len(run.response_text) for group in record.groups for run in group.trajectories]
    return Stop("no rollout of the step answered") if not any(lengths) else None


def copy_best(record: CheckpointEnd) -> None:
    """Copy the weights of the best checkpoint; a push to a hub or a bucket goes here."""
    if record.is_best:
        target = record.folder / "published"
        shutil.copytree(record.path, target, ignore=shutil.ignore_patterns("trainer", "DONE.json"), dirs_exist_ok=True)
