"""Rollouts in flight on several ranks: all sample and train, or some only sample (`cluster.sampling_ranks`).

`TUNESMITH_ALL_RANKS=1` adds three ranks, adapters, resuming on 3 -> 1 -> 2 ranks, and kills.
"""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from free_ports import find_free_port
from killed_runs import read_metrics
from tunesmith.cluster.rank_info import RankInfo
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.experience.store import load_rollouts
from tunesmith.runs.load_config import build_section
from tunesmith.runs.placement import place_config

NEEDS_ALL = pytest.mark.skipif(
    os.environ.get("TUNESMITH_ALL_RANKS") != "1", reason="TUNESMITH_ALL_RANKS=1 runs all launches of ranks"
)
pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 4
ADAPTER = "model.lora={r: 2, alpha: 8}"
AGENT = textwrap.dedent(
    """
    import os
    from tunesmith import JudgeOutput, WorkflowOutput

    async def workflow(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        left = 1 + 3 * (task["number"] % 3)
        while left > 0:
            reply = (await model(messages)).choices[0].message.content
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and?"}]
            left -= 1 + (sum(map(ord, reply)) % 2)
        return WorkflowOutput(response=reply, metrics={"rank": float(os.environ.get("RANK", 0))})

    async def judge(task, response):
        return JudgeOutput(reward=float(sum(map(ord, response)) % 7))
    """
)


class LooseRanks:
    """Ranks of one run at a time in `folder`, without a launcher that would stop them when one fails."""

    def __init__(self, folder, forks):
        self.folder, self._forks, self._processes = folder, forks, []

    def run(self, name, *overrides, num_ranks=1, options=()):
        """The folder of a run that must end well."""
        self.start(name, *overrides, num_ranks=num_ranks, options=options)
        assert self.wait() == [0] * num_ranks, self.read_log()
        return self.folder / "runs/tunesmith" / name

    def start(self, name, *overrides, num_ranks=1, options=()):
        """Start `tunesmith tune run.yaml`; returns the processes of the ranks."""
        settings = [part for each in (f"name={name}", *overrides) for part in ("--set", each)]
        port = find_free_port()
        with (self.folder / "ranks.log").open("w") as log:
            self._processes = [
                self._forks.start(
                    self.folder, "tune", "run.yaml", *settings, *options, log=log,
                    environment={} if num_ranks == 1 else build_environment(rank, num_ranks, port),
                )
                for rank in range(num_ranks)
            ]  # fmt: skip
        return self._processes

    def wait(self):
        """The exit statuses of the ranks that were started last."""
        return [process.wait(timeout=300) for process in self._processes]

    def read_log(self):
        """What these ranks have printed."""
        return (self.folder / "ranks.log").read_text()


def build_environment(rank, num_ranks, port):
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, pocket_folder, forks):
    folder = tmp_path_factory.mktemp("staleness")
    (folder / "agent.py").write_text(AGENT)
    (folder / "data").mkdir()
    rows = [{"question": f"Tom has {n} apples.", "number": n} for n in range(16)]
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "workflow": "agent.py:workflow",
        "judge": "agent.py:judge",
        "checkpoint_root_dir": "runs",
        "total_steps": NUM_STEPS,
        "save_interval_steps": 1,
        "model": {"path": pocket_folder, "max_model_len": 256, "max_tokens": 6, "device": "cpu"},
        "train_dataset": {"path": "data"},
        "eval_datasets": {"held_out": {"path": "data", "split": "test"}},
        "algorithm": {"batch_size": 4, "group_size": 2},
        "engine": {"kv_cache_tokens": 8192},
        "rollout": {"chat_model": "openai", "max_staleness": 1},
        "trainer": {"learning_rate": 1e-3},
        "evaluation": {"interval_steps": 3, "max_tasks": 3},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return LooseRanks(folder, forks)


def read_groups(run, num_steps=NUM_STEPS):
    """The trained groups of each step."""
    return [load_rollouts(run / f"rollouts/step_{step:06d}.parquet") for step in range(1, num_steps + 1)]


def assert_trained_in_time(run, num_steps=NUM_STEPS, max_staleness=1):
    """No token is older than `max_staleness` steps, some is older than 0, and each step has its whole batch."""
    lags = [
        step - version
        for step, groups in enumerate(read_groups(run, num_steps))
        for group in groups
        for trajectory in group.trajectories
        for turn in trajectory.turns
        for version in turn.policy_versions
    ]
    assert min(lags) == 0 and 1 <= max(lags) <= max_staleness
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    assert [row["rollout/num_trajectories"] for row in rows] == [8] * num_steps
    assert rows[-1]["staleness/num_in_flight"] == 0


def list_ranks(run, num_steps=NUM_STEPS):
    """The ranks that ran the trained rollouts."""
    groups = [group for each in read_groups(run, num_steps) for group in each]
    found = [{trajectory.metrics["rank"] for trajectory in group.trajectories} for group in groups]
    assert all(len(each) == 1 for each in found), "a group is run by one rank"
    return {each.pop() for each in found}


def assert_versions_are_right(run, first_model, num_steps=NUM_STEPS):
    """Each token has the logprob that the checkpoint of its version gives it, and not that of another one."""

    @cache
    def load(version):
        path = first_model if version == 0 else run / f"global_step_{version}"
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(version, turn):
        ids = torch.tensor([[*turn.prompt_ids, *turn.sampled_ids]])
        logprobs_TV = load(version)(ids).logits[0].log_softmax(-1)
        start = len(turn.prompt_ids) - 1
        return [logprobs_TV[start + i, token].item() for i, token in enumerate(turn.sampled_ids)]

    differences, others = [], []
    for groups in read_groups(run, num_steps):
        for turn in (turn for group in groups for each in group.trajectories for turn in each.turns):
            for version in set(turn.policy_versions):
                own, other = score(version, turn), score(version + 1, turn) if version < num_steps else None
                for index, (found, logprob) in enumerate(zip(turn.policy_versions, turn.logprobs, strict=True)):
                    if found == version:
                        differences.append(abs(own[index] - logprob))
                        others += [] if other is None else [abs(other[index] - logprob)]
    assert max(differences) < 1e-3, max(differences)
    assert np.mean(np.array(others) > 1e-3) > 0.5, "versions are told apart"


def test_equal_seeds_give_equal_runs_on_two_ranks(ranks, pocket_folder):
    first, second = (ranks.run(name, num_ranks=2) for name in ("one", "other"))
    assert read_metrics(first) == read_metrics(second)
    assert_trained_in_time(first)
    assert list_ranks(first) == {0, 1}
    assert_versions_are_right(first, pocket_folder)
    trained = [group.task.index for groups in read_groups(first) for group in groups]
    assert sorted(trained) == list(range(16)), "each epoch has every task once"


def test_a_rank_that_only_samples_has_the_weights_of_each_version(ranks, pocket_folder):
    run = ranks.run("split", "cluster.sampling_ranks=1", num_ranks=2)
    assert_trained_in_time(run)
    assert list_ranks(run) == {1}
    assert_versions_are_right(run, pocket_folder)
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    assert {row["cluster/num_sampling_ranks"] for row in rows} == {1}
    assert all(row["engine/num_sampled_tokens"] > 0 for row in rows[:2])
    assert {row["step"] for row in read_metrics(run) if row["kind"] == "eval"} == {3, NUM_STEPS}


@NEEDS_ALL
def test_runs_are_resumed_on_any_number_of_ranks(ranks):
    layouts = [(3, 1), (1, 0), (3, 2), (2, 0)]
    for total_steps, (num_ranks, num_samplers) in enumerate(layouts, start=1):
        overrides = [f"cluster.sampling_ranks={num_samplers}", f"total_steps={total_steps}"]
        options = ("--resume",) if total_steps > 1 else ()
        run = ranks.run("layouts", *overrides, num_ranks=num_ranks, options=options)
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    assert [row.get("cluster/num_sampling_ranks", 0) for row in rows] == [1, 0, 2, 0]
    assert [row.get("cluster/num_ranks", 1) for row in rows] == [2, 1, 1, 2]


@NEEDS_ALL
@pytest.mark.parametrize("samplers", [0, 1, 2])
@pytest.mark.parametrize("settings", [(), ("rollout.assignment=balanced", "rollout.max_staleness=2"), (ADAPTER,)])
def test_three_ranks_train_in_time(ranks, pocket_folder, samplers, settings):
    name = f"three-{samplers}-{len(settings)}-{'lora' in str(settings)}"
    run = ranks.run(name, f"cluster.sampling_ranks={samplers}", *settings, num_ranks=3)
    assert_trained_in_time(run, max_staleness=2 if len(settings) == 2 else 1)
    assert list_ranks(run) == set(range(3 - samplers if samplers else 0, 3))
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    assert max(row.get("mismatch/kl", 0.0) for row in rows) < 1e-6, "samplers have the trainers' weights"
    if ADAPTER not in settings:
        assert_versions_are_right(run, pocket_folder)


@NEEDS_ALL
@pytest.mark.parametrize("keeps", ["recompute", "keep"])
def test_refills_and_replay_work_on_ranks(ranks, keeps):
    settings = ["experience.refill_budget=2", "experience.replay.num_groups=1", "experience.replay.max_staleness=1"]
    for num_samplers in (0, 1):
        name = f"refill-{num_samplers}-{keeps}"
        settings += [f"cluster.sampling_ranks={num_samplers}", f"rollout.stale_cache={keeps}"]
        run = ranks.run(name, *settings, num_ranks=2)
        assert len(read_groups(run)) == NUM_STEPS


@NEEDS_ALL
@pytest.mark.parametrize(("samplers", "victim"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)])
def test_a_killed_rank_stops_the_others_and_the_run_resumes(ranks, samplers, victim):
    """Without a launcher that would stop them."""
    name, num_ranks = f"killed-{samplers}-{victim}", 3 if samplers == 2 else 2
    settings = [f"cluster.sampling_ranks={samplers}", "total_steps=8"]
    processes = ranks.start(name, *settings, num_ranks=num_ranks)
    metrics, deadline = ranks.folder / "runs/tunesmith" / name / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes[victim].kill()
    started = time.monotonic()
    statuses = ranks.wait()
    assert statuses[victim] == -signal.SIGKILL and all(status == 1 for i, status in enumerate(statuses) if i != victim)
    assert time.monotonic() - started < 60
    assert "another rank has ended" in ranks.read_log()
    run = ranks.run(name, *settings, num_ranks=num_ranks, options=("--resume",))
    assert len(read_groups(run, 8)) == 8


@pytest.mark.parametrize(
    ("settings", "num_ranks", "message"),
    [
        ({"cluster": {"sampling_ranks": 1}}, 2, "sampling_ranks=1 needs rollout.max_staleness of 1 or more"),
        ({"cluster": {"sampling_ranks": 2}, "rollout": {"max_staleness": 1}}, 2, "leaves no rank that trains"),
        ({"cluster": {"sampling_ranks": 1}, "rollout": {"max_staleness": 1}}, 1, "this run has one process"),
        (
            {"cluster": {"sampling_ranks": 1}, "rollout": {"max_staleness": 1}, "engine": {"kind": "vllm"}},
            2,
            "max_staleness needs engine.kind=tunesmith",
        ),
    ],
)
def test_what_cannot_only_sample_is_one_sentence(settings, num_ranks, message):
    with pytest.raises(ConfigError, match=message):
        config = build_section(
            RunConfig, {"model": {"path": "m", "device": "cpu"}, "algorithm": {"batch_size": 8}} | settings
        )
        place_config(config, RankInfo(world_size=num_ranks, local_size=num_ranks), num_gpus=0)
