"""verifiers' environments in an interpreter of their own: tasks, rewards and failures cross the process boundary.

Continuous integration has a stand-in for the package with the names that the worker uses. With
`TUNESMITH_TEST_VERIFIERS=/path/to/python`, the same tests run an environment of the real package there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace

import pytest

from conditions import until, wait_until
from tunesmith import tune
from tunesmith.config import RunConfig
from tunesmith.environments.sets.verifiers import load_environment
from tunesmith.errors import ConfigError, DataError
from tunesmith.experience.store import load_rollouts
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_functions, load_task_environment
from tunesmith.runs.tasks import load_run_tasks

REAL = os.environ.get("TUNESMITH_TEST_VERIFIERS")
REAL_SET = """
import asyncio
import os

import httpx
import verifiers.v1 as vf

class Data(vf.TaskData):
    mode: str = "pay"

class ToyTask(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def paid(self, trace) -> float:
        return 0.25
    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or "") > 0)

class ToySet(vf.Taskset[ToyTask, vf.TasksetConfig]):
    def load(self):
        for number in range(12):
            mode = {3: "raise", 4: "die", 5: "die", 11: "wait"}.get(number, "pay")
            yield ToyTask(Data(idx=number, prompt=f"Task {number}", mode=mode), self.config.task)

class ToyHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more):
        print("a line on standard output", flush=True)
        if data.mode == "raise":
            raise ValueError("broken task")
        if data.mode == "die" and not os.path.exists("died"):
            open("died", "w").close()
            os._exit(9)
        if data.mode == "wait":
            open("started", "w").close()
            try:
                await asyncio.sleep(60)
            finally:
                open("cancelled", "w").close()
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
            reply = await client.post(f"{endpoint}/chat/completions", json=body,
                                      headers={"authorization": f"Bearer {secret}"})
            reply.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["ToySet", "ToyHarness"]
"""
STAND_IN = """
import asyncio, contextlib, json, os, sys, types, urllib.request
from dataclasses import dataclass, field

__version__ = "0.4.0"


@dataclass
class Data:
    idx: int
    prompt: str

    @classmethod
    def model_validate(cls, values):
        return cls(**values)

    def model_dump(self, mode, exclude_defaults):
        return {"idx": self.idx, "prompt": self.prompt}


@dataclass
class Task:
    data: Data
    config: object = None

    @staticmethod
    def data_type():
        return Data


class Taskset:
    def __iter__(self):
        return iter([Task(Data(number, f"Task {number}")) for number in range(12)])

    @staticmethod
    def task_type():
        return Task


@dataclass
class Retries:
    max_retries: int = 0


class Config:
    retries = Retries()

    def __init__(self, values):
        assert values["agent"]["runtime"] == {"type": "subprocess"}
        if values["taskset"]["id"] != "toy":
            raise ModuleNotFoundError(f"taskset {values['taskset']['id']!r} not found")
        self.agents = values.pop("agents", ["agent"])
        self.agent = types.SimpleNamespace(retries=Retries(values["agent"].get("retries", 0)))
        self.taskset = types.SimpleNamespace(task=None)


class Environment:
    def __init__(self, config):
        self.config, self.taskset = config, Taskset()

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task):
        return [task]

    async def run_slot(self, task, context):
        print("a line on standard output", flush=True)
        names = types.SimpleNamespace
        if task.data.idx in (4, 5) and not os.path.exists("died"):
            open("died", "w").close()
            os._exit(9)
        if task.data.idx == 11:
            open("started", "w").close()
            try:
                await asyncio.sleep(60)
            finally:
                open("cancelled", "w").close()
        if task.data.idx == 3:
            trace = names(rewards={}, metrics={}, errors=[names(type="TaskError", message="broken task")])
            return names(ok=False, errors=[], traces=[trace])
        body = {"model": context.model, "messages": [{"role": "user", "content": task.data.prompt}]}
        request = urllib.request.Request(context.client.base_url + "/chat/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json", "authorization": "Bearer EMPTY"})
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
        trace = names(rewards={"paid": names(value=0.5)}, metrics={"length": 1.0, "none": None}, errors=[])
        return names(ok=True, errors=[], traces=[trace])


def add(name, **names):
    module = sys.modules["verifiers." + name] = types.ModuleType("verifiers." + name)
    vars(module).update(names)


add("v1", SamplingConfig=dict)
add("v1.clients", ModelContext=types.SimpleNamespace)
add("v1.configs")
add("v1.configs.agent", agent_config_fields=lambda config: config.agents)
add("v1.configs.client", EvalClientConfig=types.SimpleNamespace)
add("v1.utils")
add("v1.utils.loaders", load_environment=Environment, resolve_env_config=Config)
"""


@pytest.fixture
def values(tmp_path, monkeypatch, pocket_folder):
    load_environment.cache_clear()  # a process keeps the folder in which it was started
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if REAL is None:
        (tmp_path / "verifiers").mkdir()
        (tmp_path / "verifiers" / "__init__.py").write_text(STAND_IN)
    else:
        (tmp_path / "toy.py").write_text(REAL_SET)
    return {
        "name": "x",
        "environment": {
            "name": "verifiers:toy",
            "python": REAL or sys.executable,
            "num_train": 6,
            "num_test": 2,
            "args": {"folder": str(tmp_path)} if REAL is None else {"agent": {"harness": {"id": "toy"}}},
        },
        "model": {"path": pocket_folder, "max_model_len": 256, "max_tokens": 4, "device": "cpu"},
        "total_steps": 1,
        "algorithm": {"batch_size": 6, "group_size": 2},
        "engine": {"kv_cache_tokens": 4096},
        "rollout": {"http_port": 0, "max_failure_rate": 1.0},
        "eval_datasets": {},
        "monitor": {"has_progress": False, "trackers": []},
    }


def change(values, **environment):
    return build_section(RunConfig, values | {"environment": {**values["environment"], **environment}})


def test_episodes_are_played_by_the_environment_and_recorded_here(values, tmp_path):
    config = build_section(RunConfig, values)
    rows = [task.row for task in load_run_tasks(config, config.train_dataset, name="t")]
    test = build_section(RunConfig, {**values, "eval_datasets": {"test": {"path": "environment", "split": "test"}}})
    held_out = [task.row for task in load_run_tasks(test, test.eval_datasets["test"], name="t")]
    numbers = [row["data"]["idx"] for row in rows]
    assert len(numbers) == 6 and not set(numbers) & {row["data"]["idx"] for row in held_out}
    assert rows[0]["data"]["prompt"] == f"Task {numbers[0]}" and 3 in numbers and {4, 5} & set(numbers)
    result = tune(config)
    (file,) = (result.folder / "rollouts").glob("*.parquet")
    runs = {group.task.row["data"]["idx"]: group.trajectories for group in load_rollouts(file)}
    assert sorted(runs) == sorted(numbers)
    assert (tmp_path / "died").exists()  # the process ended once, and its rollouts were made again
    for run in (run for number in set(numbers) - {3} for run in runs[number]):
        assert (run.reward, run.metrics, len(run.turns), run.failure) == (0.5, {"paid": 0.5, "length": 1.0}, 1, None)
        assert 1 <= len(run.turns[0].sampled_ids) <= 4
    for run in runs[3]:
        assert run.reward is None and "broken task" in run.failure.message


@pytest.mark.anyio
async def test_a_rollout_that_is_cancelled_ends_its_episode(values, tmp_path):
    environment = load_task_environment(build_section(RunConfig, values))
    client = SimpleNamespace(api_key="key")
    model = SimpleNamespace(base_url="http://127.0.0.1:9/v1", model_name="m", as_openai_client=lambda: client)
    playing = asyncio.create_task(environment.run({"data": environment.describe(11)["data"]}, model))
    await until((tmp_path / "started").exists)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until((tmp_path / "cancelled").exists)


@pytest.mark.anyio
async def test_a_rollout_that_is_cancelled_as_its_process_ends_is_cancelled(values, tmp_path):
    environment = load_task_environment(build_section(RunConfig, values))
    client = SimpleNamespace(api_key="key")
    model = SimpleNamespace(base_url="http://127.0.0.1:9/v1", model_name="m", as_openai_client=lambda: client)
    playing = asyncio.create_task(environment.run({"data": environment.describe(11)["data"]}, model))
    await until((tmp_path / "started").exists)
    server = environment.run.__self__._shared.get()
    server._process.kill()
    wait_until(lambda: server._pipes.is_ended)  # the event loop sees nothing of it yet
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "verifiers:other"}, r"cannot be loaded: .*other.* not found.*Install verifiers==0\.4\.0"),
        ({"python": "/no/such/python"}, "cannot be started: No such file or directory: /no/such/python"),
        ({"max_turns": 3}, "environment.max_turns=3 has no effect with name=verifiers:toy"),
        ({"name": "gymnasium:Taxi-v4", "args": {}}, "python=.* has no effect with name=gymnasium:Taxi-v4: it runs in"),
        ({"num_train": 100}, "has only .* different tasks of the split train, fewer than environment.num_train=100"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_loads(values, changes, sentence):
    config = change(values, **changes)
    with pytest.raises((ConfigError, DataError), match=sentence):
        load_run_tasks(config, config.train_dataset, name="t")


def test_a_run_without_an_http_server_is_refused(values):
    values["rollout"].pop("http_port")
    with pytest.raises(ConfigError, match="calls the model over HTTP, which is off: set rollout.http_port"):
        load_functions(build_section(RunConfig, values))
