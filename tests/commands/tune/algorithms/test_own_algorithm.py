"""Runs with own advantage and loss functions, from a run file and from `tune()`."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
import yaml
from safetensors.torch import load_file

from small_runs import build_small_run, list_apples, write_splits
from tunesmith import AlgorithmConfig
from tunesmith.algorithms.advantages.group import compute_multi_step_grpo_advantages
from tunesmith.algorithms.losses.policy import compute_ppo_clip_losses
from tunesmith.commands.settings import check_paths, load_run_file
from tunesmith.errors import ConfigError

OWN = textwrap.dedent(
    """
    from tunesmith.algorithms.advantages.group import compute_multi_step_grpo_advantages
    from tunesmith.algorithms.losses.policy import TokenLosses, compute_ppo_clip_losses

    def advantages(groups, *, epsilon: float = 1e-6):
        return compute_multi_step_grpo_advantages(groups, epsilon=epsilon)

    def loss(scores, *, clip: float = 0.2):
        return compute_ppo_clip_losses(scores, clip_range_low=clip, clip_range_high=clip)
    """
)


@pytest.fixture
def run(tmp_path, pocket_folder):
    (tmp_path / "own.py").write_text(OWN)
    algorithm = AlgorithmConfig(group_size=4, batch_size=2, learning_rate=1e-3, save_interval_steps=1)
    data = write_splits(tmp_path / "data", list_apples(6))
    return build_small_run(tmp_path, pocket_folder, data, max_tokens=6, algorithm=algorithm, experiment_name=None)


def read_metrics(result):
    rows = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def test_own_functions_equal_to_the_built_in_ones_give_the_same_run(run, tmp_path):
    expected = run(experiment_name="built_in")
    in_file = run(
        f"algorithm.advantage={tmp_path}/own.py:advantages", f"algorithm.loss={tmp_path}/own.py:loss",
        "algorithm.loss_args.clip=0.2", experiment_name="file",
    )  # fmt: skip
    passed = run(
        advantage_func=compute_multi_step_grpo_advantages, loss_func=compute_ppo_clip_losses, experiment_name="passed"
    )
    for found in (in_file, passed):
        assert read_metrics(found) == read_metrics(expected)
        ours, theirs = (load_file(each.checkpoint / "model.safetensors") for each in (found, expected))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert expected.metrics["train/grad_norm"] > 0
    recorded = yaml.safe_load((passed.folder / "config.yaml").read_text())["algorithm"]
    assert recorded["loss"] == "tunesmith.algorithms.losses.policy:compute_ppo_clip_losses"
    assert recorded["advantage"].endswith("group:compute_multi_step_grpo_advantages")


def test_a_run_is_not_resumed_with_another_function(run, tmp_path):
    run(f"algorithm.loss={tmp_path}/own.py:loss", experiment_name="x")
    with pytest.raises(ConfigError, match=r"other settings: algorithm.loss was '.*own.py:loss', is None"):
        run("total_steps=3", experiment_name="x", continue_from_checkpoint=True)


def test_a_broken_loss_is_refused_before_the_run_has_a_folder(run, tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm.loss='test_own_algorithm:.*<lambda>' must return TokenLosses"):
        run(loss_func=lambda scores: -scores.logprobs_N, experiment_name="x")
    assert not (tmp_path / "runs").exists()


def test_an_advantage_function_that_fails_in_a_step_stops_the_run(run, tmp_path):
    def advantage(groups):
        return [[run.metrics["accuracy"] for run in group] for group in groups]

    with pytest.raises(ConfigError, match=r"advantage.* raised KeyError: 'accuracy' \(.*test_own_algorithm.py:\d+"):
        run(advantage_func=advantage, experiment_name="x")
    assert (tmp_path / "runs/AgentScope/x/rollouts/step_000001.parquet").exists()


def test_a_missing_file_of_an_own_function_is_found_before_libraries_load(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"path": "HuggingFaceTB/x"}, "algorithm": {"loss": "nowhere.py:loss"}}))
    with pytest.raises(ConfigError, match="algorithm.loss: no file 'nowhere.py'"):
        check_paths(load_run_file(path))
