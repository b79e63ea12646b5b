"""Latency that users of `tunesmith serve` in online mode feel while the model trains.

Users in threads send short conversations and feedback one after the other; a call that arrives during an update waits
for its end. Reported are the latencies of calls, those of calls that ran while a step was trained (longer than the
median by half an update), and the time of the updates from the run's metrics.

    python -m benchmarks.endpoint.live_latency --model models/pocket --users 16 --out results/endpoint/live_latency.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from benchmarks.shared.report import publish

RUN = """
name: live
checkpoint_root_dir: {folder}
total_steps: {steps}
save_interval_steps: 1000
model: {{path: {model}, device: {device}, max_model_len: 1024, max_tokens: {tokens}}}
algorithm: {{algorithm_type: reinforceplusplus, batch_size: {batch}, group_size: 1}}
rollout: {{chat_model: openai}}
monitor: {{has_progress: false, trackers: []}}
serve: {{mode: online, port: {port}}}
"""


class User(threading.Thread):
    """Holds conversations of one call until the server has ended."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=600)
        self._number = number
        self.latencies_s: list[float] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                self._client.get("/health").raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.2)
        try:
            for call in range(10**6):
                session = f"{self._number}-{call}"
                body = {"messages": [{"role": "user", "content": f"Conversation {session}: tell me about numbers."}]}
                started = time.perf_counter()
                headers = {"X-Session-Id": session}
                self._client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
                self.latencies_s.append(time.perf_counter() - started)
                self._client.post(f"/sessions/{session}/reward", json={"reward": float(call % 3)}).raise_for_status()
        except (httpx.TransportError, httpx.HTTPStatusError):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--users", type=int, default=16, help="concurrent users")
    parser.add_argument("--batch", type=int, default=32, help="conversations a step")
    parser.add_argument("--tokens", type=int, default=32, help="largest number of tokens of a reply")
    parser.add_argument("--steps", type=int, default=10, help="training steps")
    parser.add_argument("--out", help="JSON file for the result, results/endpoint/NAME.json")
    arguments = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(RUN.format(folder=folder, port=port, **vars(arguments)))
        users = [User(f"http://127.0.0.1:{port}", number) for number in range(arguments.users)]
        subprocess.run([sys.executable, "-m", "tunesmith", "serve", str(path)], check=True, env=os.environ)
        metrics_file = next(Path(folder).rglob("metrics.jsonl"))
        rows = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    latencies = sorted(each for user in users for each in user.latencies_s)
    updates = [row["perf/train_s"] for row in rows if "perf/train_s" in row]
    median, update = statistics.median(latencies), statistics.median(updates)
    waited = [each for each in latencies if each > median + update / 2]
    figures = {
        "num_calls": len(latencies), "p50_s": median, "p90_s": latencies[int(0.9 * len(latencies))],
        "p99_s": latencies[int(0.99 * len(latencies))], "max_s": latencies[-1], "update_p50_s": update,
        "update_max_s": max(updates), "share_that_waited": len(waited) / len(latencies),
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:<20}{value:>12.3f}")
    details = figures | vars(arguments) | {"model": Path(arguments.model).name}
    device = "cpu" if arguments.device == "auto" else arguments.device
    publish(
        name="live_latency",
        unit="1 / s, of the 99th percentile of the latency",
        ours=1 / figures["p99_s"],
        peers={},
        device=device,
        details=details,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
