"""Ctrl-C in both modes of `tunesmith serve`: the state is saved, the run resumes, workers continue with the new server.

The workers stream their completions through the URL of the attempt, and evaluations are tasks of the same queue.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import pytest

from conditions import wait_until
from free_ports import find_free_port
from killed_runs import Zygote, read_metrics
from small_pocket import write_small_pocket
from tunesmith.experience.store import load_rollouts
from tunesmith.storage import load_json

RUN = """
name: NAME
project: p
checkpoint_root_dir: runs
total_steps: 3
save_interval_steps: 1
model: {path: pocket, device: cpu, max_model_len: 256, max_tokens: 4}
trainer: {learning_rate: 1e-3}
engine: {kv_cache_tokens: 8192}
rollout: {chat_model: openai}
monitor: {has_progress: false, trackers: []}
"""
TASKS = """
train_dataset: {path: tasks.jsonl}
eval_datasets: {held_out: {path: held_out.jsonl}}
evaluation: {interval_steps: 1}
algorithm: {algorithm_type: grpo, batch_size: 1, group_size: 2}
serve: {port: PORT}
"""
ONLINE = """
algorithm: {algorithm_type: reinforceplusplus, batch_size: 2, group_size: 1}
serve: {mode: online, port: PORT}
"""
PATIENCE_S = 90


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    write_small_pocket(folder / "pocket")
    for name in ("tasks", "held_out"):
        rows = [{"question": f"{name} {number}"} for number in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    zygote = Zygote(folder)
    yield zygote, folder
    zygote.close()


def write_run(folder, name, text):
    """Write the run file; returns its path, the run folder, and the URL of the server."""
    port = find_free_port()
    path = folder / f"{name}.yaml"
    path.write_text((RUN + text).replace("NAME", name).replace("PORT", str(port)))
    return str(path), folder / "runs" / "p" / name, f"http://127.0.0.1:{port}"


class Client(threading.Thread):
    """Works until the run has ended, whichever server answers; what goes wrong is in `error`. Before the interruption
    it does one report less than the whole run needs."""

    num_needed: int

    def __init__(self, url):
        super().__init__(daemon=True)
        self.turns = []
        self.is_interrupted = threading.Event()
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self.is_ended = threading.Event()
        self.num_restarts = 0
        self.error = None
        self.start()

    def run(self):
        while not self.is_ended.is_set():
            if len(self.turns) >= self.num_needed - 1:
                self.is_interrupted.wait(PATIENCE_S)
            try:
                self.work()
            except httpx.TransportError:  # no server, or it ended during a call
                self.num_restarts += 1
                time.sleep(0.05)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (401, 410):
                    self.error = error
                    return
                time.sleep(0.05)

    def stream(self, url, key, messages, headers=()):
        """Ids of the tokens of a streamed completion, and those of its prompt."""
        body = {"messages": messages, "stream": True, "return_token_ids": True}
        headers = {"Authorization": f"Bearer {key}", **dict(headers)}
        prompt_ids, sampled_ids = None, []
        with self.client.stream("POST", url, json=body, headers=headers) as reply:
            if reply.status_code != 200:
                reply.read()
                reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise httpx.ReadError("the stream ended with an error")
                    prompt_ids = chunk.get("prompt_token_ids", prompt_ids)
                    sampled_ids += [each for choice in chunk["choices"] for each in choice["token_ids"]]
        return prompt_ids, sampled_ids


class Worker(Client):
    """A worker of the queue of tasks: each step has two rollouts and an evaluation of three tasks."""

    num_needed = 3 * (2 + 3) - 3  # without the last evaluation

    def work(self):
        reply = self.client.get("/tasks/next", params={"wait_s": 5})
        if reply.status_code != 200:
            reply.raise_for_status()
            return
        taken = reply.json()
        messages = [{"role": "user", "content": taken["task"]["question"]}]
        turn = self.stream(f"{taken['base_url']}/chat/completions", taken["api_key"], messages)
        path = f"/trajectories/{taken['attempt_id']}/reward"
        self.client.post(path, json={"reward": float(sum(turn[1]) % 7)}).raise_for_status()
        self.turns.append(turn)


class User(Client):
    """Live traffic with feedback: each step has two sessions."""

    num_needed = 3 * 2

    def work(self):
        session_id = f"user-{len(self.turns)}-{self.num_restarts}"
        messages = [{"role": "user", "content": session_id}]
        turn = self.stream("/v1/chat/completions", "none", messages, {"X-Session-Id": session_id})
        self.turns.append(turn)
        self.client.post(f"/sessions/{session_id}/reward", json={"reward": float(sum(turn[1]) % 7)}).raise_for_status()


def wait_for_steps(run, number):
    wait_until((run / f"global_step_{number}" / "DONE.json").exists)


@pytest.mark.parametrize(("name", "text", "client_class"), [("tasks", TASKS, Worker), ("online", ONLINE, User)])
def test_ctrl_c_saves_the_state_and_the_run_resumes_with_the_same_workers(zygote, name, text, client_class):
    process, folder = zygote
    path, run, url = write_run(folder, name, text)
    log = folder / "zygote.log"
    log.write_text("")
    client = client_class(url)
    pid = process.start(["serve", path])
    wait_for_steps(run, 1)
    os.kill(pid, signal.SIGINT)
    assert process.wait() == 130
    client.is_interrupted.set()
    output = log.read_text()
    assert "SIGINT: finishing and saving this step" in output
    assert "resume" in output and "Traceback" not in output
    num_committed = load_json(run / "last_commit.json")["step"]
    assert 1 <= num_committed < 3

    assert process.run(["serve", path, "--resume"]) == 0
    client.is_ended.set()
    client.join(timeout=PATIENCE_S)
    assert client.error is None
    assert not client.is_alive()
    assert "Traceback" not in log.read_text()
    trained = [row["step"] for row in read_metrics(run) if row["kind"] == "train"]
    assert trained == [1, 2, 3]
    groups = [group for each in sorted((run / "rollouts").iterdir()) for group in load_rollouts(each)]
    trajectories = [each for group in groups for each in group.trajectories]
    assert [each.failure for each in trajectories] == [None] * 6
    recorded = [(list(turn.prompt_ids), list(turn.sampled_ids)) for each in trajectories for turn in each.turns]
    assert len(recorded) == 6
    assert all(turn in [(list(prompt), sampled) for prompt, sampled in client.turns] for turn in recorded)
    if client_class is Worker:
        evaluations = sorted(each.name for each in (run / "eval").glob("step_*.json"))
        assert evaluations[-1] == "step_000003.json"
        evaluated = [row for row in read_metrics(run) if "eval/held_out/reward" in row]
        assert [row["step"] for row in evaluated][-3:] == [1, 2, 3]
