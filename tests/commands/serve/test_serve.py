"""`tunesmith serve` on the pocket model with real workers in other processes, in Python and Node.js."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from free_ports import find_free_port
from tunesmith import serve, tune
from tunesmith.errors import ConfigError
from tunesmith.experience.samples import build_samples
from tunesmith.experience.store import load_rollouts

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RECIPE = ROOT / "recipes" / "external_worker"
SMALL = (
    "model.device=cpu", "engine.kv_cache_tokens=8192", "model.max_model_len=256", "model.max_tokens=6",
    "algorithm.batch_size=2", "algorithm.group_size=4", "trainer.learning_rate=1e-3", "monitor.has_progress=false",
    "monitor.trackers=[]", "rollout.chat_model=openai", "total_steps=2",
)  # fmt: skip


@pytest.fixture
def train(tmp_path, pocket_folder):
    """Starts workers, runs `serve`, and returns its result and the workers' exit statuses."""
    started: list[subprocess.Popen[bytes]] = []

    def call(*commands, folder=tmp_path, **options):
        port = find_free_port()
        environment = {**os.environ, "TUNESMITH_URL": f"http://127.0.0.1:{port}", "PYTHONPATH": str(ROOT)}
        started.extend(subprocess.Popen(command, cwd=folder, env=environment) for command in commands)
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in options.items()]
        paths = [
            f"model.path={pocket_folder}",
            f"train_dataset.path={RECIPE / 'tasks.jsonl'}",
            f"checkpoint_root_dir={tmp_path / 'runs'}",
            f"serve.port={port}",
            "name=x",
        ]
        result = serve(RECIPE / "run.yaml", overrides=[*SMALL, *paths, *overrides])
        return result, [process.wait(timeout=60) for process in started]

    yield call
    for process in started:
        process.kill()
        process.wait()


def read_groups(result):
    return [group for path in sorted((result.folder / "rollouts").iterdir()) for group in load_rollouts(path)]


def test_every_token_of_two_steps_is_recorded_once_and_the_task_of_a_killed_worker_is_issued_again(train, tmp_path):
    worker = [sys.executable, str(HERE / "recording_worker.py"), str(tmp_path / "notes.jsonl")]
    result, statuses = train([*worker, "live"], [*worker, "die"], serve__lost_after_s=2)
    assert statuses == [0, -signal.SIGKILL]
    assert result.num_steps == 2
    assert result.has_learned
    groups = read_groups(result)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(trajectories) == 16
    assert [trajectory.failure for trajectory in trajectories] == [None] * 16

    noted = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    expected = [([(t["prompt_ids"], t["sampled_ids"]) for t in each["turns"]], each["reward"]) for each in noted]
    recorded = [
        ([(list(turn.prompt_ids), list(turn.sampled_ids)) for turn in trajectory.turns], trajectory.reward)
        for trajectory in trajectories
    ]
    assert sorted(recorded) == sorted(expected)

    samples, metrics = build_samples(groups, [[1.0] * len(group.trajectories) for group in groups])
    assert metrics["rollout/num_branches"] == 0
    for sample, trajectory in zip(samples, trajectories, strict=True):
        trained = [token for token, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True) if is_sampled]
        assert trained == [token for turn in trajectory.turns for token in turn.sampled_ids]
    versions = [{version for turn in each.turns for version in turn.policy_versions} for each in trajectories]
    assert versions == [{0}] * 8 + [{1}] * 8


def test_the_recipes_worker_in_python_trains_and_ends_with_the_run(train):
    result, statuses = train([sys.executable, str(RECIPE / "worker.py")])
    assert statuses == [0]
    assert result.has_learned
    assert "rollout/accuracy/mean" in result.metrics


def find_npm_package(name: str) -> Path:
    """The folder `node_modules` with the package; skips the test if there is none."""
    require_node()
    found = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True, check=False).stdout.strip()
    places = [os.environ.get("TUNESMITH_NODE_MODULES"), RECIPE / "node_modules", ROOT / "node_modules", found]
    for place in places:
        if place and (Path(place) / name / "package.json").is_file():
            return Path(place)
    pytest.skip(f"needs the npm package {name}: npm install --prefix recipes/external_worker {name}")


def require_node() -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs Node.js with npm")


def test_the_recipes_worker_in_javascript_trains_with_the_openai_package(train, tmp_path):
    modules = find_npm_package("openai")
    (tmp_path / "node_modules").symlink_to(modules)
    shutil.copy(RECIPE / "worker.mjs", tmp_path)
    result, statuses = train(["node", "worker.mjs"])
    assert statuses == [0]
    assert result.has_learned
    assert [each.failure for group in read_groups(result) for each in group.trajectories] == [None] * 16


def test_a_worker_in_javascript_needs_only_fetch(train):
    require_node()
    result, statuses = train(["node", str(HERE / "fetch_worker.mjs")], total_steps=1)
    assert statuses == [0]
    assert result.has_learned


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workflow=agent.py:solve", "workflow='agent.py:solve' has no effect with `tunesmith serve`"),
        ("serve.host=0.0.0.0", "serve: host=0.0.0.0 lets other machines take tasks and post rewards"),
        ("serve.api_key_env=NO_SUCH_KEY", "serve.api_key_env: the environment variable NO_SUCH_KEY is not set"),
        ("cluster={launcher: ray, num_workers: 2}", "serve with cluster.launcher=ray: workers"),
    ],
)
def test_settings_are_refused_before_the_model_loads(override, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=message):
        serve(RECIPE / "run.yaml", overrides=[override])


async def ask_nothing(task, model):
    raise AssertionError


def test_other_training_refuses_the_section(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="serve has no effect without workers: run the file with `tunesmith serve`"):
        tune(RECIPE / "run.yaml", workflow_func=ask_nothing)


@pytest.mark.parametrize(
    ("environment", "override", "message"),
    [
        (
            {},
            "serve.mode=online serve.lost_after_s=120",
            "serve.mode=online with 2 ranks: live conversations run on one rank only",
        ),
        ({}, "serve.public_url=http://a", "serve.public_url='http://a' is one address for 2 ranks"),
        ({"LOCAL_WORLD_SIZE": "1"}, "serve.port=0", "1 of 2 ranks run on others: start torchrun on one host only"),
        ({"LOCAL_RANK": "1", "RANK": "1"}, "serve.port=65535", "serve.port=65535 leaves no port for rank 1"),
    ],
)
def test_ranks_that_cannot_share_workers_are_refused(environment, override, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, value in ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        serve(RECIPE / "run.yaml", overrides=override.split())


def test_a_port_in_use_is_found_before_the_model_loads(monkeypatch):
    monkeypatch.chdir(ROOT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot serve on 127.0.0.1:{port}: .*; set serve.port to a free port"):
            serve(RECIPE / "run.yaml", overrides=[f"serve.port={port}", "model.path=./no_such_model"])
        overrides = [f"rollout.http_port={port}", "serve=null", "model.path=./no_such_model"]
        with pytest.raises(ConfigError, match=f"cannot serve on 127.0.0.1:{port}: .*; set rollout.http_port to a free"):
            tune(RECIPE / "run.yaml", workflow_func=ask_nothing, overrides=overrides)


def test_a_port_in_use_is_one_sentence(train):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot serve on 127.0.0.1:{port}: .*; set serve.port to a free port"):
            train(serve__port=port)
