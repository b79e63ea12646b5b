"""Updates on 2 and 3 ranks equal those of one, for every algorithm of the table."""

from __future__ import annotations

import math

import pytest
import torch
from rank_updates import ALONE, list_cases, run_all, run_case


@pytest.fixture(scope="module", params=[2, 3])
def results(request, tmp_path_factory):
    """Of each rank, by case; the processes are started once."""
    folder = tmp_path_factory.mktemp("ranks")
    run_all(folder, world_size=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", list_cases())
def test_weights_and_metrics_do_not_depend_on_ranks(name, results):
    metrics, expected, state = run_case(name, ALONE)
    for rank, result in enumerate(results):
        found_metrics, found, found_state = result[name]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert found_metrics.keys() == metrics.keys()
        for key, value in metrics.items():
            # rows are packed on each rank
            if key != "train/num_tokens":
                assert math.isclose(found_metrics[key], value, rel_tol=1e-8, abs_tol=1e-10), key
        assert found_state.keys() == (state.keys() if rank == 0 else set())
        for key, value in found_state.items():
            torch.testing.assert_close(value, state[key], rtol=0, atol=1e-10)
