"""Models that a rank loads."""

from __future__ import annotations

import pytest

from tunesmith.config import RunConfig
from tunesmith.runs.policy import load_actors


@pytest.mark.parametrize("has_rollouts", [True, False])
def test_a_rank_without_rollouts_loads_no_auxiliary_models(pocket_folder, has_rollouts):
    model = {"path": str(pocket_folder), "max_model_len": 64, "device": "cpu"}
    values = {
        "model": model | {"max_tokens": 8},
        "auxiliary_models": {"helper": {"path": str(pocket_folder), "max_model_len": 128}},
        "engine": {"kv_cache_tokens": 256},
    }
    _, actors = load_actors(
        RunConfig.model_validate(values),
        workflow=lambda task, model: None,
        judge=None,
        build_model=lambda endpoint, options: endpoint,
        has_rollouts=has_rollouts,
    )
    assert len(actors.auxiliary_engines) == len(actors.auxiliary_models) == int(has_rollouts)
