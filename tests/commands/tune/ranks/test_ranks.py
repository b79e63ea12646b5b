"""`tune --ranks` on CPU processes: equal to one rank, resumed on any number of ranks, stopped when one is killed.

`TUNESMITH_ALL_RANKS=1` adds launches: a run in new interpreters, one that is resumed on 3, and on 2, 3 and 1 ranks, the
kill of the first rank, an error of one rank, a missing model, branching rollouts, and tasks that are handed out on
demand.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from conditions import wait_until
from forked_programs import LOG, ForkedPrograms
from killed_runs import read_metrics
from run_folders import AGENT, held_after, write_run_folder
from tunesmith.cli import app
from tunesmith.experience.store import load_rollouts

pytestmark = pytest.mark.timeout(900)  # each run starts several interpreters
NOT_COMPARED = ("engine/", "cluster/", "train/num_tokens")
"""Differ by the number of ranks: forwards, prefixes shared within a rank, and rows."""
NEEDS_ALL = pytest.mark.skipif(
    os.environ.get("TUNESMITH_ALL_RANKS") != "1", reason="TUNESMITH_ALL_RANKS=1 runs all launches of ranks"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_run_folder(
        folder,
        total_steps=6,
        algorithm={"batch_size": 4, "group_size": 4},
        trainer={"learning_rate": 1e-3, "num_minibatches": 2},
    )
    return folder


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tunesmith", "tune", "run.yaml", "--set", f"name={name}", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder: Path, name: str, *arguments: str, forks: ForkedPrograms | None = None) -> Path:
    """A finished run: of processes that the command starts, or of forks in their place."""
    process = start(folder, name, *arguments) if forks is None else fork(forks, folder, name, *arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return folder / "runs/tunesmith" / name


def fork(forks: ForkedPrograms, folder: Path, name: str, *arguments: str) -> subprocess.Popen:
    return forks.start(folder, "tune", "run.yaml", "--set", f"name={name}", *arguments)


@pytest.fixture(scope="module")
def alone(folder, forks):
    return run(folder, "alone", forks=forks)


@pytest.fixture(scope="module")
def pair(folder, forks):
    return run(folder, "pair", "--ranks", "2", forks=forks)


def assert_equal_runs(found: Path, expected: Path) -> None:
    found_rows, expected_rows = read_metrics(found), read_metrics(expected)
    assert [row["step"] for row in found_rows] == [row["step"] for row in expected_rows]
    for mine, theirs in zip(found_rows, expected_rows, strict=True):
        for key, value in theirs.items():
            if isinstance(value, float) and not key.startswith((*NOT_COMPARED, "mismatch/")):
                assert math.isclose(mine[key], value, rel_tol=1e-3, abs_tol=1e-5), (mine["step"], key)
    assert_close_weights(found, expected)
    groups, theirs = (load_rollouts(each / "rollouts/step_000003.parquet") for each in (found, expected))
    assert [group.task for group in groups] == [group.task for group in theirs]
    sampled = [[turn.sampled_ids for t in group.trajectories for turn in t.turns] for group in groups]
    assert sampled == [[turn.sampled_ids for t in group.trajectories for turn in t.turns] for group in theirs]


def assert_close_weights(found: Path, expected: Path) -> None:
    """AdamW divides by the size of a gradient, so rounding of a tiny one moves its weight visibly."""
    one, other = (load_file(each / "global_step_6/model.safetensors") for each in (found, expected))
    for name, values in other.items():
        difference = np.abs(one[name] - values)
        assert difference.mean() < 1e-6 and difference.max() < 1e-3, name


def test_two_ranks_make_the_run_of_one(alone, pair):
    assert_equal_runs(pair, alone)
    rows = [row for row in read_metrics(pair) if row["kind"] == "train"]
    assert {row["cluster/num_ranks"] for row in rows} == {2}
    assert not any("cluster/num_ranks" in row for row in read_metrics(alone))


@NEEDS_ALL
def test_the_command_starts_ranks_of_its_own_interpreter(folder, pair):
    """The other runs are forks."""
    found = run(folder, "started", "--ranks", "2", "--set", "total_steps=1", "--set", "evaluation.at_start=false")
    rows, expected = ([row for row in read_metrics(each) if row["kind"] == "train"] for each in (found, pair))
    assert rows == expected[:1]


LAUNCHER = f"""
import sys
from tunesmith.cluster.launch import launch_ranks
from tunesmith.errors import RankError

sys.executable = {sys.executable!r}
launch_ranks(2, ["--help"])
try:
    launch_ranks(2, ["tune", "nowhere.yaml"])
except RankError as error:
    print(f"the launcher says: {{error}}")
"""


def test_ranks_are_processes_of_the_interpreter_and_their_errors_reach_the_launcher(forks, tmp_path):
    """Commands that import no torch."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    status = forks.run(["python", "launcher.py"], folder=tmp_path)
    log = (tmp_path / LOG).read_text()
    assert status == 0, log
    assert log.count("Usage: ") == 2
    assert "the launcher says: config file nowhere.yaml does not exist" in log


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([(3, 6)], id="3", marks=NEEDS_ALL),
        pytest.param([(2, 4), (3, 5), (1, 6)], id="2, 3, 1", marks=NEEDS_ALL),
    ],
)
def test_a_run_of_one_rank_is_resumed_on_any_number_of_ranks(folder, forks, alone, stages):
    """Numbers of ranks, and the step at which they stop."""
    name = f"moved-{len(stages)}"
    shutil.copytree(alone, alone.with_name(name))
    for index, (num_ranks, total_steps) in enumerate(stages):
        how = ["--resume"] if index else ["--resume-from", "2"]
        steps = ("--set", f"total_steps={total_steps}")
        found = run(folder, name, *how, "--ranks", str(num_ranks), *steps, forks=forks)
    for step in (2, *(total_steps for _, total_steps in stages)):
        assert (found / f"global_step_{step}/DONE.json").is_file()
    rows, expected = read_metrics(found), read_metrics(alone)
    kinds = {(row["step"], row["kind"]) for row in expected}
    last, theirs = (
        next(row for row in reversed(each) if row["step"] == 6 and row["kind"] == "train") for each in (rows, expected)
    )
    assert last.get("cluster/num_ranks", 1) == stages[-1][0]
    assert kinds <= {(row["step"], row["kind"]) for row in rows}
    assert math.isclose(last["train/loss"], theirs["train/loss"], rel_tol=1e-2, abs_tol=1e-4)
    assert_close_weights(found, alone)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=NEEDS_ALL), 1])
def test_a_killed_rank_stops_the_others_and_the_run_resumes_bit_for_bit(folder, forks, pair, victim):
    name = f"killed-{victim}"
    metrics, num_rows = folder / "runs/tunesmith" / name / "metrics.jsonl", random.Random(victim).randrange(2, 5)
    with held_after(metrics, num_rows):
        process = fork(forks, folder, name, "--ranks", "2")
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= num_rows)
        ranks = forks.find_ranks(process)
        assert len(ranks) == 2
        os.kill(ranks[victim], signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"tunesmith: rank {victim} was killed by signal 9 (SIGKILL)" in output
    assert "--resume" in output
    found = run(folder, name, "--ranks", "2", "--resume", forks=forks)
    assert read_metrics(found) == read_metrics(pair)
    one, other = (load_file(each / "global_step_6/model.safetensors") for each in (found, pair))
    assert all((one[key] == other[key]).all() for key in other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "8"], "algorithm.batch_size=4 is smaller than cluster.num_workers=8"),
        (["--gpus", "64", "--set", "algorithm.batch_size=64"], "--gpus 64: this host has"),
        (["--gpus", "2", "--ranks", "2"], "give only one of them"),
        (["--ranks", "2", "--set", "model.device=cuda:1"], "each rank has a GPU of its own"),
    ],
)
def test_bad_input_is_one_sentence(folder, arguments, message, monkeypatch):
    """Before any rank is started."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tunesmith.runs.launch.launch_ranks", None)
    result = CliRunner().invoke(app, ["tune", "run.yaml", "--set", "name=bad", *arguments])
    assert result.exit_code == 1
    errors = [line for line in result.output.splitlines() if line.startswith("tunesmith: ")]
    assert len(errors) == 1 and message in errors[0], result.output
    assert not (folder / "runs/tunesmith/bad").exists()


SEARCHER = """
from tunesmith import WorkflowOutput, replayable

@replayable
async def search(query: str) -> str:
    return f"There are {len(query)} letters and {sum(map(ord, query)) % 10} apples."

async def workflow(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    for number in range(3):
        text = (await model(messages)).choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        if number < 2:
            messages.append({"role": "user", "content": await search(text)})
    return WorkflowOutput(reward=float(sum(map(ord, text)) % 5))
"""


@NEEDS_ALL
@pytest.mark.parametrize("credit", ["soft", "hard"])
def test_rollouts_branch_on_two_ranks_as_on_one(folder, forks, credit):
    (folder / "searcher.py").write_text(SEARCHER)
    settings = [
        "workflow=searcher.py:workflow",
        "judge=null",
        "model.max_model_len=256",
        f"rollout.branching.credit={credit}",
    ]
    settings += ["rollout.branching.initial_rollouts=2"]
    settings += ["rollout.branching.base_probability=0.7"]
    overrides = [part for each in settings for part in ("--set", each)]
    alone = run(folder, f"branching-{credit}", *overrides, forks=forks)
    pair = run(folder, f"branching-{credit}-2", "--ranks", "2", *overrides, forks=forks)
    assert_equal_runs(pair, alone)
    assert any(row.get("rollout/num_branched_rollouts", 0) > 0 for row in read_metrics(pair))


SLEEPER = """
import asyncio, os
from tunesmith import WorkflowOutput

async def workflow(task, model):
    reply = await model([{"role": "user", "content": task["question"]}])
    await asyncio.sleep(0.4 if os.environ.get("RANK") == "1" else 0.0)
    text = reply.choices[0].message.content
    rank = float(os.environ.get("RANK", 0))
    return WorkflowOutput(reward=float(sum(map(ord, text)) % 5), metrics={"rank": rank})
"""


@NEEDS_ALL
def test_a_rank_whose_tools_are_slow_runs_fewer_tasks_on_demand(folder, forks):
    """Every task is run once, with the tokens that it has on one rank."""
    (folder / "sleeper.py").write_text(SLEEPER)
    settings = ["workflow=sleeper.py:workflow", "judge=null", "algorithm.batch_size=8", "total_steps=2"]
    settings += ["rollout.max_concurrency=4", "rollout.assignment=balanced", "experience.refill_budget=1"]
    overrides = [part for each in settings for part in ("--set", each)]
    alone = run(folder, "demand", *overrides, forks=forks)
    pair = run(folder, "demand-2", "--ranks", "2", *overrides, forks=forks)
    groups, theirs = (load_rollouts(each / "rollouts/step_000001.parquet") for each in (pair, alone))
    assert [group.task for group in groups] == [group.task for group in theirs]
    sampled, expected = (
        [[turn.sampled_ids for run in group.trajectories for turn in run.turns] for group in each]
        for each in (groups, theirs)
    )
    assert sampled == expected
    ranks = [{run.metrics["rank"] for run in group.trajectories} for group in groups]
    assert all(len(each) == 1 for each in ranks), "a group is run by one rank"
    numbers = [each.pop() for each in ranks]
    assert 1 <= numbers.count(1.0) < numbers.count(0.0)


@NEEDS_ALL
def test_a_model_that_no_rank_finds_is_reported_once(folder):
    process = start(folder, "bad", "--ranks", "2", "--set", "model.path=nowhere")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    errors = [line for line in output.splitlines() if line.startswith("tunesmith: ")]
    assert len(errors) == 1 and "nowhere" in errors[0], output
    assert not (folder / "runs/tunesmith/bad").exists()


@NEEDS_ALL
def test_an_error_of_one_rank_is_reported_once(folder):
    """The judge fails on one rank only by chance; too many failures are an error of the first rank."""
    agent = AGENT.replace("return JudgeOutput(", "raise RuntimeError('no verdict')\n    return JudgeOutput(")
    (folder / "broken.py").write_text(agent)
    process = start(
        folder, "broken", "--ranks", "2", "--judge", "broken.py:judge", "--set", "evaluation.at_start=false"
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert sum(line.startswith("tunesmith: ") for line in output.splitlines()) == 1, output
    assert "no verdict" in output
