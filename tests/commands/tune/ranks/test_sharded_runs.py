"""`tune --ranks` with sharded weights and one (fake) vLLM: what it receives, what is saved, resume on other ranks.

`TUNESMITH_ALL_RANKS=1` adds the comparison with one rank, and runs that are resumed on 3 and on 1 ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from killed_runs import read_metrics
from small_pocket import write_small_pocket

pytestmark = pytest.mark.timeout(900)
FAKE = Path(__file__).parents[3] / "fake_vllm"
NEEDS_ALL = pytest.mark.skipif(
    os.environ.get("TUNESMITH_ALL_RANKS") != "1", reason="TUNESMITH_ALL_RANKS=1 runs all launches of ranks"
)
AGENT = """
import itertools
from tunesmith import WorkflowOutput

numbers = itertools.count()

async def workflow(task, model):
    number = next(numbers)
    question = f"{task['question']} ({number % 8})"  # the fake vLLM samples the same tokens for equal questions
    reply = await model([{"role": "user", "content": question}])
    return WorkflowOutput(response=reply.choices[0].message.content, reward=float(number % 8))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    write_small_pocket(folder / "pocket")
    (folder / "agent.py").write_text(AGENT)
    (folder / "data").mkdir()
    rows = [{"question": f"Tom has {n} apples and buys {n + 3} more. How many?"} for n in range(12)]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    installed = folder / "site" / "vllm-0.26.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    config = {
        "workflow": "agent.py:workflow",
        "checkpoint_root_dir": "runs",
        "total_steps": 4,
        "save_interval_steps": 2,
        "model": {"path": "pocket", "max_model_len": 128, "max_tokens": 6, "device": "cpu"},
        "train_dataset": {"path": "data"},
        "eval_datasets": {"held_out": {"path": "data", "split": "train"}},
        "evaluation": {"at_start": True, "interval_steps": 2, "max_tasks": 8},
        "algorithm": {"batch_size": 4, "group_size": 4, "kl_coef": 0.01},
        "engine": {"kind": "vllm"},
        "rollout": {"chat_model": "openai"},
        "trainer": {"learning_rate": 1e-3, "num_minibatches": 2, "mismatch_stop": 1e9, "mismatch_warn": 1e9},
        "monitor": {"trackers": []},
        "cluster": {"has_sharded_weights": True},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def run(folder, forks):
    """Makes a run; returns its folder. What vLLM received is in the folder `received NAME`."""

    def call(name: str, *arguments: str) -> Path:
        path = os.pathsep.join([str(FAKE), str(folder / "site"), os.environ.get("PYTHONPATH", "")])
        received = folder / f"received {name}"
        received.mkdir(exist_ok=True)
        extra = json.dumps({"received": str(received)})
        settings = [f"name={name}", f"engine.vllm.python={sys.executable}"]
        settings += [f"engine.vllm.args.additional_config={extra}"]
        chosen = [part for each in settings for part in ("--set", each)]
        process = forks.start(folder, "tune", "run.yaml", *chosen, *arguments, environment={"PYTHONPATH": path})
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return folder / "runs/tunesmith" / name

    return call


@pytest.fixture(scope="module")
def pair(run):
    return run("pair", "--ranks", "2")


def read_weights(run_folder: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(run_folder / f"global_step_{step}/model.safetensors")


def test_vllm_receives_the_weights_of_each_step(folder, pair):
    received = [load_file(path) for path in sorted((folder / "received pair").iterdir())]
    assert len(received) == 5  # before each step or evaluation of new weights
    saved = read_weights(pair, 2)
    start = load_file(folder / "pocket/model.safetensors")
    for name, weight in saved.items():
        assert np.array_equal(received[2][name], weight), name
        assert np.array_equal(received[4][name], read_weights(pair, 4)[name]), name
        assert np.array_equal(received[0][name], start[name]), name
    assert any(not np.array_equal(weight, start[name]) for name, weight in saved.items())


def test_the_first_rank_samples_and_all_train(pair):
    rows = [row for row in read_metrics(pair) if row["kind"] == "train"]
    assert all(row["cluster/num_ranks"] == 2 and row["cluster/num_moved_groups"] >= 1 for row in rows)
    assert all(row["engine/num_requests"] == 16 for row in rows)


@pytest.fixture(scope="module")
def alone(run):
    return run("alone")


def assert_equal_runs(found: Path, expected: Path) -> None:
    rows = [[row for row in read_metrics(run) if row["kind"] == "train"] for run in (found, expected)]
    for mine, theirs in zip(*rows, strict=True):
        for key in ("train/loss", "train/grad_norm", "train/kl", "mismatch/kl", "rollout/reward_mean"):
            assert np.isclose(mine[key], theirs[key], rtol=1e-3, atol=1e-5), (mine["step"], key)
    weights, others = read_weights(found, 4), read_weights(expected, 4)
    for name, values in others.items():
        difference = np.abs(weights[name] - values)
        assert difference.mean() < 1e-6 and difference.max() < 1e-3, name


@NEEDS_ALL
def test_two_ranks_make_the_run_of_one(alone, pair):
    assert_equal_runs(pair, alone)


@NEEDS_ALL
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_run_resumes_on_another_number_of_ranks(run, pair, alone, num_ranks):
    name = f"resumed-{num_ranks}"
    run(name, "--ranks", "2", "--set", "total_steps=2")
    resumed = run(name, "--resume", "--ranks", str(num_ranks))
    assert_equal_runs(resumed, alone)
