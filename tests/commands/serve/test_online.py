"""`serve.mode=online` on the pocket model: live traffic in a thread of its own, with feedback later."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest

from free_ports import find_free_port
from tunesmith import serve
from tunesmith.errors import ConfigError
from tunesmith.experience.store import load_rollouts

RUN = """
name: x
total_steps: 2
save_interval_steps: 2
model: {path: MODEL, device: cpu, max_model_len: 256, max_tokens: 6}
algorithm: {algorithm_type: reinforceplusplus, batch_size: 3, group_size: 1}
trainer: {learning_rate: 1e-3}
engine: {kv_cache_tokens: 8192}
rollout: {chat_model: openai}
monitor: {has_progress: false, trackers: []}
serve: {mode: online}
"""


class Traffic(threading.Thread):
    """Users of the model: each session is asked twice, and some receive feedback, until the server has ended."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.client = httpx.Client(base_url=url, timeout=60)
        self.noted: dict[str, list[tuple[list[int], list[int]]]] = {}
        self.rewards: dict[str, float] = {}
        self.ending: Exception | None = None

    def run(self) -> None:
        try:
            self.wait_for_server()
            for number in range(200):
                self.hold_conversation(f"user-{number}", has_feedback=number % 3 != 2)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            self.ending = error

    def wait_for_server(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                self.client.get("/health").raise_for_status()
                return
            except httpx.ConnectError:
                time.sleep(0.1)

    def hold_conversation(self, session_id: str, *, has_feedback: bool) -> None:
        messages = [{"role": "user", "content": f"I am {session_id}"}]
        for _ in range(2):
            body = {"messages": messages, "return_token_ids": True}
            reply = self.client.post("/v1/chat/completions", json=body, headers={"X-Session-Id": session_id})
            completion = reply.raise_for_status().json()
            choice = completion["choices"][0]
            messages += [
                {"role": "assistant", "content": choice["message"]["content"] or ""},
                {"role": "user", "content": "and"},
            ]
            self.noted.setdefault(session_id, []).append((completion["prompt_token_ids"], choice["token_ids"]))
        if has_feedback:
            self.rewards[session_id] = float(sum(self.noted[session_id][-1][1]) % 7)
            body = {"reward": self.rewards[session_id], "response": session_id}
            self.client.post(f"/sessions/{session_id}/reward", json=body).raise_for_status()


@pytest.fixture
def run_file(tmp_path: Path, pocket_folder: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("MODEL", pocket_folder))
    return path


def test_conversations_with_feedback_train_the_model_that_keeps_serving(run_file, tmp_path):
    port = find_free_port()
    traffic = Traffic(f"http://127.0.0.1:{port}")
    traffic.start()
    result = serve(run_file, overrides=[f"serve.port={port}", f"checkpoint_root_dir={tmp_path}"])
    traffic.join(timeout=60)
    assert isinstance(traffic.ending, httpx.TransportError) or traffic.ending.response.status_code in (401, 410)
    assert (result.num_steps, result.has_learned) == (2, True)
    groups = [group for path in sorted((result.folder / "rollouts").iterdir()) for group in load_rollouts(path)]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(trajectories) == 6
    for each in trajectories:
        turns = [(list(turn.prompt_ids), list(turn.sampled_ids)) for turn in each.turns]
        assert turns == traffic.noted[each.response_text]
        assert each.reward == traffic.rewards[each.response_text]
    assert len({each.response_text for each in trajectories}) == 6
    newest = [max(version for turn in each.turns for version in turn.policy_versions) for each in trajectories]
    assert set(newest[:3]) == {0}
    assert newest[-1] == 1  # sampled by the new weights, after the first update


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.group_size=4", "does not work with this algorithm.group_size: set it to 1"),
        ("algorithm.algorithm_type=grpo", "algorithm.group_size=1: 'grpo' compares rollouts of a task"),
        ("algorithm.algorithm_type=remax", "choose one that needs no baseline rollouts"),
        ("total_steps=null", "does not work with this total_steps"),
        ("train_dataset.path=.", "does not work with this train_dataset"),
        ("serve.max_attempts=2", "max_attempts=2 has no effect with mode=online"),
    ],
)
def test_what_live_traffic_cannot_train_is_refused_before_the_model_loads(run_file, override, message):
    with pytest.raises(ConfigError, match=message):
        serve(run_file, overrides=[override, "model.path=none"])
