"""`tunesmith serve` on two CPU ranks: a plain HTTP worker of one address, and what happens when a rank is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest

from killed_runs import read_metrics
from small_pocket import write_small_pocket
from tunesmith.experience.store import load_rollouts

pytestmark = pytest.mark.timeout(600)
RUN = """
project: p
checkpoint_root_dir: runs
total_steps: 2
save_interval_steps: 1
model: {path: pocket, device: cpu, max_model_len: 256, max_tokens: 4}
trainer: {learning_rate: 1e-3}
engine: {kv_cache_tokens: 8192}
rollout: {chat_model: openai}
monitor: {trackers: []}
train_dataset: {path: tasks.jsonl}
eval_datasets: {held_out: {path: tasks.jsonl}}
evaluation: {interval_steps: 2, max_tasks: 2}
algorithm: {algorithm_type: grpo, batch_size: 2, group_size: 2}
serve: {port: 0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served_ranks")
    write_small_pocket(folder / "pocket")
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"question": f"task {n}"}) + "\n" for n in range(4)))
    (folder / "run.yaml").write_text(RUN)
    return folder


class Worker(threading.Thread):
    """Works at one URL until the run has ended; `turns` are its calls, by attempt, with the port they went to."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.client = httpx.Client(base_url=url, timeout=60)
        self.turns: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.num_reports = 0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        while self.error is None:
            try:
                reply = self.client.get("/tasks/next", params={"wait_s": 5})
            except httpx.TransportError:  # the server has ended
                return
            if reply.status_code == 410:
                return
            if reply.status_code == 204:
                continue
            try:
                self.work(reply.raise_for_status().json())
            except httpx.HTTPError as error:
                self.error = error

    def work(self, taken: dict) -> None:
        body = {"messages": [{"role": "user", "content": taken["task"]["question"]}], "return_token_ids": True}
        url, headers = f"{taken['base_url']}/chat/completions", {"Authorization": f"Bearer {taken['api_key']}"}
        reply = self.client.post(url, json=body, headers=headers).raise_for_status().json()
        sampled = reply["choices"][0]["token_ids"]
        self.turns[tuple(reply["prompt_token_ids"]), tuple(sampled)] = httpx.URL(taken["base_url"]).port
        report = f"/trajectories/{taken['attempt_id']}/reward"
        self.client.post(report, json={"reward": float(sum(sampled) % 7)}).raise_for_status()
        self.num_reports += 1


def start(forks, folder, name, *arguments):
    """The command, and the URL that it prints."""
    process = forks.start(folder, "serve", "run.yaml", "--ranks", "2", "--set", f"name={name}", *arguments)
    for line in process.stdout:
        if line.startswith("tasks for workers: "):
            return process, line.removeprefix("tasks for workers: ").removesuffix("/tasks/next\n")
    raise AssertionError("the command ended before it served")


def test_two_ranks_train_on_what_a_worker_of_one_address_does(forks, folder):
    process, url = start(forks, folder, "whole")
    workers = [Worker(url), Worker(url)]
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    for each in workers:
        each.join(timeout=60)
        assert each.error is None and not each.is_alive()
    run = folder / "runs/p/whole"
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    assert [row["cluster/num_ranks"] for row in rows] == [2.0, 2.0]
    assert [row["rollout/num_failed"] for row in rows] == [0.0, 0.0]
    groups = [group for path in sorted((run / "rollouts").iterdir()) for group in load_rollouts(path)]
    turns = workers[0].turns | workers[1].turns
    recorded = [turn for group in groups for each in group.trajectories for turn in each.turns]
    assert len(recorded) == 8
    assert {(tuple(turn.prompt_ids), tuple(turn.sampled_ids)) for turn in recorded} <= turns.keys()
    assert len(set(turns.values())) == 2, "each rank samples for its own attempts"
    assert sum(each.num_reports for each in workers) == 8 + 2
    rewards = [each.reward for group in groups for each in group.trajectories]
    assert rewards == [float(sum(turn.sampled_ids) % 7) for turn in recorded]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_with_one_sentence_and_it_resumes(forks, folder, victim):
    name = f"killed-{victim}"
    process, url = start(forks, folder, name, "--set", "total_steps=50")
    worker, deadline = Worker(url), time.monotonic() + 120
    while not (folder / f"runs/p/{name}/global_step_1/DONE.json").exists():
        assert process.poll() is None and worker.error is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(forks.find_ranks(process)[victim], signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    errors = [line for line in output.splitlines() if line.startswith("tunesmith: rank")]
    assert len(errors) == 1 and f"rank {victim} was killed by signal 9 (SIGKILL)" in errors[0], output
    assert "Traceback" not in output
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=5):
        pass
    committed = max(int(each.parent.name.split("_")[-1]) for each in (folder / f"runs/p/{name}").glob("*/DONE.json"))
    process, url = start(forks, folder, name, "--set", f"total_steps={committed + 1}", "--resume")
    worker = Worker(url)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    trained = [row["step"] for row in read_metrics(folder / f"runs/p/{name}") if row["kind"] == "train"]
    assert trained == list(range(1, committed + 2)) and worker.error is None
