"""Seconds from the start of a command to its error, or to the first line of its run, for one or more source trees.

    python -m benchmarks.commands.startup --tree before=/path/to/old/checkout --tree after=. \\
        --out results/commands/startup.json

Each command runs `--repeats` times in its own process, alternating between trees. The minimum is reported, as wall time
and as CPU time, which other programs on the machine affect less. A run is killed at its first line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shared.report import publish

RUN = """\
model: {path: ./model, device: cpu, max_model_len: 256, max_tokens: 8}
train_dataset: {path: ./tasks.jsonl}
workflow: flow.py:solve
checkpoint_root_dir: ./runs
total_steps: 1
algorithm: {batch_size: 2, group_size: 2}
"""
FLOW = """\
async def solve(task, model):
    return {"reward": 0.0}
"""
COMMANDS = {
    "help": ["--help"],
    "misspelt run file": ["tune", "rum.yaml"],
    "unknown key": ["tune", "run.yaml", "--set", "trainer.learning_rat=1"],
    "bad value": ["tune", "run.yaml", "--set", "trainer.learning_rate=-1"],
    "unknown option": ["tune", "run.yaml", "--epochs", "3"],
    "misspelt model folder": ["tune", "run.yaml", "--set", "model.path=./modle"],
    "misspelt data file": ["tune", "run.yaml", "--set", "train_dataset.path=./task.jsonl"],
    "misspelt workflow file": ["tune", "run.yaml", "--workflow", "flwo.py:solve"],
    "first line of a run": ["tune", "run.yaml"],
}


def write_inputs(folder: Path) -> None:
    """Write a run file and everything it names."""
    subprocess.run(
        [sys.executable, "-m", "tunesmith", "model", "prepare", "pocket", "--out", "model"],
        cwd=folder, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    (folder / "run.yaml").write_text(RUN)
    (folder / "flow.py").write_text(FLOW)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"question": str(n)}) + "\n" for n in range(4)))


def time_command(tree: Path, arguments: list[str], folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds until the first line that the command prints."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith", *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(tree)},
    )  # fmt: skip
    assert process.stdout is not None
    while not process.stdout.readline().strip():  # skip empty lines
        assert process.poll() is None, arguments
    wall = time.perf_counter() - started
    process.send_signal(signal.SIGKILL)
    process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree", action="append", required=True, metavar="NAME=FOLDER", help="checkout to time; repeatable"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    trees = {name: Path(folder).resolve() for name, _, folder in (each.partition("=") for each in arguments.tree)}
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in COMMANDS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        for command, words in COMMANDS.items():
            for _ in range(arguments.repeats):
                for name, tree in trees.items():
                    samples[command].setdefault(name, []).append(time_command(tree, words, folder))
            for name, found in samples[command].items():
                wall, cpu = (min(values) for values in zip(*found, strict=True))
                print(f"{command:24} {name:8} wall {wall:6.2f} s  CPU {cpu:6.2f} s", flush=True)
    slowest = {name: max(min(wall for wall, _ in samples[each][name]) for each in COMMANDS) for name in trees}
    ours = list(trees)[-1]
    publish(
        name="startup",
        unit="commands/s",
        ours=1 / slowest[ours],
        peers={name: 1 / seconds for name, seconds in slowest.items() if name != ours},
        device="cpu",
        details={"seconds_wall_and_cpu": samples},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
