"""`kill -9` of a random rank at a random moment, under torchrun and under Ray; the run ends as if nothing had happened.

One kill under torchrun is always run, on three ranks. `TUNESMITH_ALL_RANKS=1` runs all of them: ten kills on two and
three CPU ranks under each launcher, and errors that Ray must not restart after. The tests of Ray need the extra `ray`,
and start a cluster of two nodes on this machine.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from test_ranks import NEEDS_ALL, folder, fork, run, start  # noqa: F401 - `folder` is a fixture

from conditions import wait_until
from killed_runs import read_metrics

pytestmark = pytest.mark.timeout(1200)
HAS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
NUM_KILLS = 10
NUM_ALWAYS_RUN = 1
SMALL = ("--set", "total_steps=4", "--set", "algorithm.group_size=2")
"""Four steps with two checkpoints, and seven lines of metrics."""
PROGRAM = """
from tunesmith import JudgeOutput, WorkflowOutput, tune

async def ask(task, model):
    reply = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=reply.choices[0].message.content)

async def judge(task, response):
    return JudgeOutput(reward=float(len(response) % 5))

if __name__ == "__main__":
    result = tune(
        "run.yaml", workflow_func=ask, judge_func=judge,
        overrides=["workflow=null", "judge=null", "name=program", "cluster.launcher=ray", "cluster.num_workers=3"],
    )
    print("steps:", result.num_steps, "learned:", result.has_learned)
"""


@pytest.fixture(scope="module")
def find_whole(folder, forks):  # noqa: F811
    """The uninterrupted run on a number of ranks."""
    return cache(lambda number: run(folder, f"whole-{number}", "--ranks", str(number), *SMALL, forks=forks))


@pytest.fixture(scope="module")
def cluster():
    """Variables that name a Ray cluster of two nodes with two CPUs each."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    found.add_node(num_cpus=2)
    yield {"RAY_ADDRESS": found.address}
    found.shutdown()


def assert_same_run(found: Path, expected: Path) -> None:
    assert read_metrics(found) == read_metrics(expected)
    one, other = (load_file(each / "global_step_4/model.safetensors") for each in (found, expected))
    assert all((one[key] == other[key]).all() for key in other)


def list_descendants(pid: int) -> list[int]:
    """Processes that a process has started, directly or not."""
    children = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    except OSError:  # a thread or the process has ended meanwhile
        pass
    return [each for child in children for each in (child, *list_descendants(child))]


def find_ray_workers(pid: int) -> list[int]:
    """The ranks of a run, by the names that Ray gives their processes."""
    found = []
    for each in list_descendants(pid):
        try:
            name = Path(f"/proc/{each}/cmdline").read_text()
        except OSError:
            continue
        found += [each] if name.startswith("ray::RayTrainWorker") else []
    return sorted(found)


def kill_one(
    process: subprocess.Popen, find: Callable[[], list[int]], metrics: Path, rng: random.Random, *, num_ranks: int
) -> bool:
    """Kill a random rank after a random number of metrics' lines and a random delay; False if the run was faster."""
    num_rows, delay, deadline = rng.randrange(6), rng.uniform(0, 1), time.monotonic() + 300
    while len(find()) < num_ranks or (
        num_rows and (not metrics.exists() or metrics.read_text().count("\n") < num_rows)
    ):
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(delay * (5 if num_rows == 0 else 1))
    ranks = find()
    if process.poll() is not None or len(ranks) != num_ranks:
        return False
    try:
        os.kill(rng.choice(ranks), signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return False
    return True


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=NEEDS_ALL if seed >= NUM_ALWAYS_RUN else ()) for seed in range(NUM_KILLS)]
)
def test_a_killed_rank_of_torchrun_ends_the_run_and_it_resumes(folder, forks, find_whole, seed):  # noqa: F811
    rng, name = random.Random(seed), f"torchrun-{seed}"
    num_ranks = rng.choice((2, 3))
    process = fork(forks, folder, name, "--ranks", str(num_ranks), *SMALL)
    metrics = folder / "runs/tunesmith" / name / "metrics.jsonl"
    is_killed = kill_one(process, partial(forks.find_ranks, process), metrics, rng, num_ranks=num_ranks)
    output, _ = process.communicate(timeout=300)
    if is_killed and process.returncode:
        assert "was killed by signal 9 (SIGKILL)" in output and "--resume" in output, output
        run(folder, name, "--ranks", str(num_ranks), *SMALL, "--resume", forks=forks)
    else:  # after the last step
        assert process.returncode == 0, output
    assert_same_run(metrics.parent, find_whole(num_ranks))


def test_a_signal_to_the_launcher_saves_the_step_and_the_run_resumes(folder, forks, find_whole):  # noqa: F811
    never_due = ("--set", "save_interval_steps=100")
    process = fork(forks, folder, "signal", "--ranks", "2", *SMALL, *never_due)
    metrics = folder / "runs/tunesmith/signal/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM and output.count("finishing and saving this step") == 1, output
    assert "the last checkpoint is" in output and list(metrics.parent.glob("global_step_*")), output
    run(folder, "signal", "--ranks", "2", *SMALL, "--resume", forks=forks)
    assert_same_run(metrics.parent, find_whole(2))


@NEEDS_ALL
@HAS_RAY
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_ray_restarts_a_run_whose_rank_was_killed(folder, find_whole, cluster, seed, monkeypatch):  # noqa: F811
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    rng, name = random.Random(100 + seed), f"ray-{seed}"
    num_ranks = rng.choice((2, 3))
    process = start(folder, name, "--ranks", str(num_ranks), *SMALL, "--set", "cluster.launcher=ray")
    metrics = folder / "runs/tunesmith" / name / "metrics.jsonl"
    is_killed = kill_one(process, lambda: find_ray_workers(os.getpid()), metrics, rng, num_ranks=num_ranks)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert not is_killed or "all ranks are stopped" in output or "step 4/4" in output, output
    assert_same_run(metrics.parent, find_whole(num_ranks))
    assert not list((folder / "runs").glob(".ray-*"))


@NEEDS_ALL
@HAS_RAY
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2", "--judge", "broken.py:judge", "--set", "evaluation.at_start=false"], "no verdict"),
        (["--ranks", "2", "--set", "model.path=nowhere"], "nowhere"),
        (["--ranks", "5", "--set", "algorithm.batch_size=8"], "the Ray cluster has 4 CPUs"),
        (["--ranks", "2", "--set", "model.device=cuda"], "the Ray cluster has 0 GPUs"),
    ],
)
def test_a_lasting_error_is_one_sentence(folder, cluster, arguments, message, monkeypatch):  # noqa: F811
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    (folder / "broken.py").write_text("async def judge(task, response):\n    raise RuntimeError('no verdict')\n")
    process = start(folder, "bad", *arguments, "--set", "cluster.launcher=ray")
    output, _ = process.communicate(timeout=300)
    errors = [line for line in output.splitlines() if line.startswith("tunesmith: ")]
    assert process.returncode == 1 and len(errors) == 1 and message in errors[0], output
    assert not list((folder / "runs").glob(".ray-*"))


@NEEDS_ALL
@HAS_RAY
def test_a_program_of_functions_runs_on_ray(folder, cluster, monkeypatch):  # noqa: F811
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert "steps: 6 learned: True" in done.stdout, done.stdout + done.stderr
    assert {row.get("cluster/num_ranks", 3) for row in read_metrics(folder / "runs/tunesmith/program")} == {3}
