"""Seconds to the first word, the first step and the first look at a rollout, as a user sees them.

A run file of the pocket model on a CPU: from the start of `tunesmith tune` to its first line and to the line of its
first step, and from the start of `tunesmith show` on that run to its first line. Also the size of the install: the
packages that `pip install --dry-run --report FILE` lists, in an environment that has torch alone.

    python -m benchmarks.commands.first_hour --out results/commands/first_hour.json --report tunesmith=FILE ...
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

AGENT = """\
from tunesmith import JudgeOutput, WorkflowOutput

async def workflow(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    completion = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=completion.choices[0].message.content)

async def judge(task, response):
    return JudgeOutput(reward=len(response) % 3)
"""
RUN = """\
name: first
workflow: agent.py:workflow
judge: agent.py:judge
total_steps: 2
model: {path: pocket, max_model_len: 128, max_tokens: 16, device: cpu}
train_dataset: {path: train.jsonl}
algorithm: {group_size: 4, batch_size: 4}
"""


def time_lines(command: list[str], folder: Path, starts: list[str]) -> list[float]:
    """Seconds until the first line that begins with each text."""
    started, found = time.perf_counter(), {}
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith", *command], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        for start in starts:
            if line.startswith(start) and start not in found:
                found[start] = round(time.perf_counter() - started, 2)
    assert process.wait() == 0, command
    return [found[start] for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", action="append", default=[], metavar="NAME=FILE", help="of pip, repeatable")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        (folder / "run.yaml").write_text(RUN)
        rows = [{"question": f"{number} plus 1"} for number in range(8)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "tunesmith", "model", "prepare", "pocket", "--out", "pocket"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        words, step = time_lines(["tune", "run.yaml"], folder, ["tune:", "step 1/2"])
        (look,) = time_lines(["show", "checkpoints/tunesmith/first"], folder, [""])
    packages: dict[str, Any] = {}
    for each in arguments.report:
        label, _, path = each.partition("=")
        names = sorted(item["metadata"]["name"] for item in json.loads(Path(path).read_text())["install"])
        packages[label] = {"number": len(names), "names": names}
    result = {"first_word_s": words, "first_step_s": step, "first_look_s": look, "packages": packages}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
