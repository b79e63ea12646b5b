"""CPU time of handing a rank's groups to the first one: whole, and as references, which are sent before the update.

python -m benchmarks.ranks.group_exchange --out results/ranks/group_exchange.json
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.report import describe_environment
from tunesmith.experience.finished_group import build_reference
from tunesmith.types import Distribution, Group, Task, Trajectory, Turn


def build_groups(arguments: argparse.Namespace) -> list[Group]:
    """Groups of rollouts of one call each, with random tokens."""
    rng, groups = np.random.default_rng(0), []
    for index in range(arguments.tasks):
        task = Task(task_id=f"q/{index}", index=index, row={"question": "How many apples does Tom have now? " * 8})
        prompt_ids, runs = tuple(rng.integers(0, 150_000, arguments.prompt_tokens).tolist()), []
        for run_index in range(arguments.group):
            turn = Turn(
                prompt_ids=prompt_ids,
                sampled_ids=tuple(rng.integers(0, 150_000, arguments.new_tokens).tolist()),
                logprobs=tuple((-12 * rng.random(arguments.new_tokens)).astype(np.float32).tolist()),
                policy_versions=(3,) * arguments.new_tokens,
                distribution=Distribution(),
                stop_reason="length",
            )
            run = Trajectory(task=task, run_index=run_index, turns=(turn,), reward=1.0, response_text="word " * 160)
            runs.append(run)
        groups.append(Group(task=task, trajectories=tuple(runs)))
    return groups


def time_parts(send: Callable[[], bytes], receive: Callable[[bytes], Any], *, repeats: int) -> dict[str, float]:
    """The least CPU milliseconds of sending and receiving, and the size."""
    sending, receiving, data = [], [], b""
    for _ in range(repeats):
        started = time.process_time()
        data = send()
        sent = time.process_time()
        receive(data)
        sending.append(sent - started)
        receiving.append(time.process_time() - sent)
    return {"sender_ms": 1e3 * min(sending), "receiver_ms": 1e3 * min(receiving), "bytes": len(data)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=64, help="groups of the rank")
    parser.add_argument("--group", type=int, default=8, help="rollouts per group")
    parser.add_argument("--new-tokens", type=int, default=256, help="sampled tokens per rollout")
    parser.add_argument("--prompt-tokens", type=int, default=85, help="prompt tokens per rollout")
    parser.add_argument("--repeats", type=int, default=30, help="of which the fastest counts")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    groups = build_groups(arguments)
    tasks = [group.task for group in groups]

    def build(data: bytes) -> list[Group]:
        pairs = zip(pickle.loads(data), tasks, strict=True)
        return [replace(each, task=task).map(partial(replace, task=task)) for each, task in pairs]

    ways = {
        "whole": time_parts(lambda: pickle.dumps(groups), pickle.loads, repeats=arguments.repeats),
        "references": time_parts(
            lambda: pickle.dumps([build_reference(group) for group in groups]), build, repeats=arguments.repeats
        ),
    }
    for name, row in ways.items():
        print(f"{name:9}{row['sender_ms']:8.2f} ms sent{row['receiver_ms']:8.2f} ms received{row['bytes']:10} bytes")
    if arguments.out is not None:
        settings = {name: value for name, value in vars(arguments).items() if name != "out"}
        record = {"arguments": settings, "ways": ways, "environment": describe_environment("cpu")}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
