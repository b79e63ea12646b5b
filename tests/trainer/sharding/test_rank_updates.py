"""Updates on 2 and 3 ranks equal those of one, for every algorithm; of those that differ in advantages alone one runs.

`TUNESMITH_ALL_RANKS=1` runs every case on 2 and on 3 ranks.
"""

from __future__ import annotations

import functools
import math
import sys

import pytest
import torch
from rank_updates import ALONE, SPLIT, is_run, list_cases, run_case, run_narrow, run_resumed

from forked_programs import LOG, start_forked_programs

PROGRAM = f"""
import sys
sys.path[:0] = {sys.path}
from pathlib import Path
from rank_updates import run_all
run_all(Path())
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of each rank, by number of ranks and by case; the processes are started once."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "program.py").write_text(PROGRAM)
    status = start_forked_programs().run(["python", "program.py"], folder=folder)
    assert status == 0, (folder / LOG).read_text()
    return {number: [torch.load(folder / f"{rank} of {number}.pt") for rank in range(number)] for number in (2, 3)}


run_alone = functools.cache(functools.partial(run_case, ranks=ALONE))


@pytest.mark.parametrize(("name", "num_samplers"), SPLIT)
def test_ranks_that_only_sample_get_the_weights_of_one_rank(name, num_samplers, results):
    _, expected, _ = run_alone(name)
    first, *others = (result[f"{name}, {num_samplers} sample"] for result in results[3])
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-10)
    assert all(torch.equal(each, first) for each in others)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", list_cases())
def test_weights_and_metrics_do_not_depend_on_ranks(name, num_ranks, results):
    if not is_run(name, num_ranks):
        pytest.skip("TUNESMITH_ALL_RANKS=1 runs all cases on 2 and 3 ranks")
    metrics, expected, state = run_alone(name)
    for rank, result in enumerate(results[num_ranks]):
        found_metrics, found, found_state = result[name]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert found_metrics.keys() == metrics.keys()
        for key, value in metrics.items():
            # rows are packed on each rank, and the load is the largest of any
            if key not in ("train/num_tokens", "routing/max_load", "routing/unused"):
                assert math.isclose(found_metrics[key], value, rel_tol=1e-8, abs_tol=1e-10), key
        assert found_state.keys() == (state.keys() if rank == 0 else set())
        for key, value in found_state.items():
            torch.testing.assert_close(value, state[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["resumed", "resumed, sharded weights"])
def test_a_resumed_optimizer_continues_its_steps_and_schedule_and_counts_no_time_of_reading(name, num_ranks, results):
    alone = run_resumed(ALONE)
    assert {int(value) for key, value in alone["state"].items() if key.startswith("step:")} == {
        8
    }  # 4 steps of 2 updates
    assert alone["metrics"]["train/learning_rate"] == pytest.approx(1e-2 * (1 + math.cos(math.pi / 3)) / 2)
    for rank, found in enumerate(result[name] for result in results[num_ranks]):
        assert found["times"] == {"perf/train_wait_s": 0.0, "perf/communication_s": 0.0}
        assert found["metrics"]["train/learning_rate"] == alone["metrics"]["train/learning_rate"]
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=1e-10)
        assert found["state"].keys() == (alone["state"].keys() if rank == 0 else set())
        for key, value in found["state"].items():
            torch.testing.assert_close(value, alone["state"][key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sharded_16_bit_weights_are_rounded_masters(num_ranks, results):
    alone = run_narrow(ALONE)
    first, *others = [result["narrow"] for result in results[num_ranks]]
    whole = results[num_ranks][0]["narrow, whole weights"]["after"]
    assert alone["num_warnings"] == first["num_warnings"] == 2 and not any(each["num_warnings"] for each in others)
    assert set(first["masters"].values()) == {torch.float32}
    assert first["state"].keys() == alone["state"].keys() and not any(each["state"] for each in others)
    for name, weight in alone["before"].items():
        assert torch.equal(first["before"][name], weight) and first["before"][name].dtype == torch.bfloat16
        assert torch.equal(first["after"][name], first["state"][f"master:{name}"].bfloat16())
        assert torch.equal(first["saved"][name], first["after"][name])
        torch.testing.assert_close(first["after"][name], whole[name], rtol=1e-2, atol=1e-4)
        assert all(torch.equal(each["after"][name], first["after"][name]) for each in others)
        # rows are rounded to 16 bits in another order, and AdamW divides by the size of a gradient
        assert (first["after"][name].float() - alone["after"][name].float()).abs().mean() < 2e-3
        assert not torch.equal(weight, alone["after"][name])
