"""Small runs of the untrained pocket model, most of them made to fail in one way."""

from __future__ import annotations

import contextlib

import pytest

from small_runs import build_small_run, list_apples, write_splits
from tunesmith import AlgorithmConfig
from tunesmith.commands.doctor.diagnose import diagnose
from tunesmith.errors import TunesmithError


@pytest.fixture
def run(tmp_path, pocket_folder):
    """Calls tune() with small settings; returns the diagnosis, also of a run that stops with an error."""
    algorithm = AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-4)
    data = write_splits(tmp_path / "data", list_apples(60))

    def call(*overrides, steps=2, **arguments):
        start = build_small_run(
            tmp_path, pocket_folder, data, "monitor.trackers=[]", "save_interval_steps=1000", steps=steps,
            max_tokens=12, algorithm=algorithm,
        )  # fmt: skip
        with contextlib.suppress(TunesmithError):
            start(*overrides, **arguments)
        return diagnose(tmp_path / "runs/AgentScope" / arguments.get("experiment_name", "x"))

    return call
