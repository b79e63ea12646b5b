"""Ten mistakes of a first program, and what Tunesmith answers: the console's lines, and the error that ends the run.

Each mistake is a change of one correct agent, judge or run file, run for a step of the pocket model on a CPU. Run it at
two commits to compare their answers:

    python -m benchmarks.commands.beginner_mistakes --out results/commands/beginner_mistakes.txt
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tunesmith import RunConfig, tune
from tunesmith.errors import TunesmithError
from tunesmith.model.prepare import prepare_model

AGENT = """\
from tunesmith import JudgeOutput, WorkflowOutput

async def workflow(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    completion = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=completion.choices[0].message.content)

async def judge(task, response):
    return JudgeOutput(reward=len(response) % 3)
"""
MISTAKES: dict[str, tuple[str, str] | dict[str, object]] = {
    "a field that the task does not have": ('task["question"]', 'task["quesiton"]'),
    "a forgotten await": ("await model", "model"),
    "a plain function with the asynchronous client": ("async def workflow", "def workflow"),
    "a judge without the task": ("judge(task, response)", "judge(response)"),
    "a judge that fails on a good response": ("len(response) % 3", 'task["anwser"] == response'),
    "a workflow that returns text": ("WorkflowOutput(response=completion.choices[0].message.content)", '"text"'),
    "a judge that returns text as the reward": ("len(response) % 3", '"good"'),
    "tasks that are solved already": ("len(response) % 3", "1"),
    "a data set that does not exist": {"train_dataset": {"path": "trian.jsonl"}},
    "a misspelt knob": {"algorithm": {"group_sise": 4}},
}


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        yield text


def answer(name: str, folder: Path, model: Path) -> str:
    """What the user reads."""
    change = MISTAKES[name]
    source = AGENT.replace("await model", "model", 1) if "plain function" in name else AGENT
    if isinstance(change, tuple):
        assert change[0] in source
        source = source.replace(change[0], change[1])
        change = {}
    number = list(MISTAKES).index(name)
    agent = folder / f"agent{number}.py"
    agent.write_text(source)
    values = {
        "name": f"mistake{number}", "checkpoint_root_dir": str(folder), "total_steps": 1,
        "workflow": f"{agent}:workflow", "judge": f"{agent}:judge",
        "train_dataset": {"path": str(folder / "train.jsonl")},
        "model": {"path": str(model), "max_model_len": 128, "max_tokens": 8, "device": "cpu"},
        "rollout": {"chat_model": "openai"}, "monitor": {"has_progress": False, "trackers": []},
    }  # fmt: skip
    algorithm = {"group_size": 2, "batch_size": 2} | dict(change.get("algorithm", {}))  # type: ignore[call-overload]
    with captured() as text:
        try:
            tune(RunConfig.model_validate(values | change | {"algorithm": algorithm}))
        except (TunesmithError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
    hidden = re.compile(
        r"^(model|trains|device|memory|folder|watch|        |TuneResult|  \w+ +/|  steps|  reward|Writing)"
    )
    lines = [line for line in text.getvalue().replace(str(folder), ".").splitlines() if not hidden.match(line)]
    return "\n".join(line for line in lines if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"question": f"{number} plus 1", "answer": str(number + 1)} for number in range(4)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = prepare_model("pocket", folder / "pocket")
        text = "".join(f"== {mistake}\n{answer(mistake, folder, model)}\n\n" for mistake in MISTAKES)
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
