"""Harbor: task folders whose image is not needed, as `harbor:FOLDER` of one task or of several.

The programs of this machine stand in for those of the image: under bubblewrap, without a network, read-only above a
folder of the episode. A Dockerfile may say FROM, WORKDIR, COPY and ENV; a task that needs more is refused by what it
needs, and so is one whose solution is not paid 1, or doing nothing is. The model runs commands with the tool `bash`,
until a reply without a call. Then the tests run among its files, with files of theirs that it has not seen.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.environments.episode import Observation, Reply, TaskEnvironment, find_split
from tunesmith.environments.protocols import write_result
from tunesmith.environments.transcript import Segment
from tunesmith.errors import ConfigError, ToolUnavailableError
from tunesmith.tools.python.call import shorten_text
from tunesmith.tools.tool import write_schema

SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/passwd", "/etc/ld.so.cache")
ISOLATION = "--unshare-all --die-with-parent --new-session --clearenv --dev /dev --proc /proc".split()  # noqa: SIM905
PREPARE = """
set -e; export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root; mkdir -p /tmp /root
ulimit -v 8388608 -f 262144  # kB of memory of a process, and of a file
copy() {
    to="${@: -1}"; case "$to" in */|.) mkdir -p "$to";; *) mkdir -p "$(dirname "$to")";; esac
    for from in "${@:1:$#-1}"; do
        from="/environment/$from"; if [ -d "$from" ]; then mkdir -p "$to"; from="$from/."; fi; cp -r "$from" "$to"
    done
}
"""
COMMAND_TIMEOUT_S = 30.0
"""Of all commands of a reply: more than `step_timeout_s` of slow ones would be a failure, not an observation."""
MAX_CHARS = 10_000
UNSUPPORTED = {
    "environment": ("docker_image", "gpus", "tpu", "mcp_servers", "healthcheck"),
    "agent": ("user",),
    "verifier": ("user", "environment_mode"),
}
BASH = write_schema(
    "bash",
    "Run a command in the task's folder. Files are kept from call to call, processes and variables not.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a task folder says."""

    folder: Path
    instruction: str
    steps: tuple[str, ...]
    """The Dockerfile as commands."""
    tests_timeout_s: float


def load(member: str) -> TaskEnvironment:
    path = Path(member).resolve()
    if shutil.which("bwrap") is None:
        raise ConfigError("environment harbor needs bubblewrap: apt-get install bubblewrap")
    folders = [path] if (path / "task.toml").is_file() else sorted(each.parent for each in path.glob("*/task.toml"))
    if not folders:
        raise ConfigError(f"environment=harbor:{member}: neither the folder nor a folder in it has a task.toml")
    tasks = {each.name: load_task(each) for each in folders}
    rows: dict[str, list[Mapping[str, Any]]] = {"train": [], "test": []}
    for seed, name in enumerate(tasks):
        rows[find_split(name) if len(tasks) > 1 else "train"].append({"seed": seed, "id": name})
    return TaskEnvironment(name=f"harbor:{member}", create=functools.partial(Episode, tasks), rows=rows)


@functools.cache
def load_task(folder: Path) -> Task:
    """The task of a folder, if its solution is paid 1, and doing nothing less."""
    try:
        task = read_task(folder)
        for is_solved in (False, *([True] if (folder / "solution" / "solve.sh").exists() else [])):
            episode = Episode({"": task})
            try:
                episode.reset({"id": ""})
                if is_solved:
                    episode.run("bash /solution/solve.sh", task.tests_timeout_s, {"/solution": folder / "solution"})
                reward = episode.finish()
            finally:
                episode.close()
            if (reward == 1) != is_solved:
                raise ValueError(f"{'its solution' if is_solved else 'doing nothing'} is paid {reward:g}")
    except (OSError, ValueError, AttributeError, ToolUnavailableError) as error:
        raise ConfigError(
            f"environment harbor: the task {folder.name!r} cannot run here, without its image: {error}"
        ) from error
    return task


def read_task(folder: Path) -> Task:
    """The task of a folder; ValueError if it needs what is not here."""
    settings = tomllib.loads((folder / "task.toml").read_text())
    wanted = [f"{name}.{key}" for name, keys in UNSUPPORTED.items() for key in keys if settings.get(name, {}).get(key)]
    wanted += ["steps"] if "steps" in settings else []
    if wanted or (folder / "environment" / "docker-compose.yaml").exists():
        raise ValueError(f"{wanted[0]} in its task.toml" if wanted else "its docker-compose.yaml")
    steps = []
    for line in (folder / "environment" / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
        name, _, rest = line.partition("#")[0].strip().partition(" ")
        if name == "WORKDIR":
            steps.append(f"mkdir -p {rest}; cd {rest}")
        elif name == "ENV" and "=" in rest:
            steps.append(f"export {rest}")
        elif name == "COPY" and not rest.startswith(("-", "[")):
            steps.append(f"copy {rest}")
        elif name and (name != "FROM" or " AS " in rest.upper()):
            raise ValueError(f"{line.strip()[:80]!r} in its Dockerfile")
    limit = float(settings.get("verifier", {}).get("timeout_sec", 600))
    instruction = (folder / "instruction.md").read_text()
    return Task(folder=folder, instruction=instruction, steps=tuple(steps), tests_timeout_s=limit)


class Episode:
    """One episode. A command still runs to its time limit when the rollout has ended."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self._root: str | None = None
        self.tools = [BASH]
        self.metrics: dict[str, float] = {}

    def reset(self, task: Mapping[str, Any]) -> str:
        self._task, self._root = self._tasks[task["id"]], tempfile.mkdtemp(prefix="tunesmith-harbor-")
        said, status = self.run("true", COMMAND_TIMEOUT_S, {"/environment": self._task.folder / "environment"})
        if status:
            raise ToolUnavailableError(f"the files of task {self._task.folder.name} cannot be copied: {said}")
        return self._task.instruction

    def step(self, action: Reply) -> tuple[Observation, float, bool]:
        if not action.calls:
            return "", self.finish(), True
        ends_at = time.monotonic() + COMMAND_TIMEOUT_S
        return [write_result(each.call_id, self._answer(each, ends_at)) for each in action.calls], 0.0, False

    def finish(self) -> float:
        """The reward that the tests write; numbers beside it are metrics."""
        name, shown = self._task.folder.name, {"/tests": self._task.folder / "tests"}
        with tempfile.TemporaryDirectory(prefix="tunesmith-harbor-") as logs:
            folder = Path(logs, "verifier")
            folder.mkdir()
            said, _ = self.run("bash /tests/test.sh", self._task.tests_timeout_s, {**shown, "/logs": Path(logs)})
            try:
                path = folder / "reward.txt"
                values = json.loads((path if path.is_file() else folder / "reward.json").read_text())
                values = values if isinstance(values, dict) else {"reward": values}
                self.metrics = {key: float(each) for key, each in values.items()}
                reward = self.metrics.pop("reward" if "reward" in values or len(values) != 1 else next(iter(values)))
                if not math.isfinite(reward):
                    raise ValueError(f"it is {reward}")
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise ToolUnavailableError(f"the tests of {name} wrote no reward ({error}): {said[-300:]!r}") from error
        return reward

    def run(self, command: str, timeout_s: float, shown: Mapping[str, Path]) -> tuple[str, int]:
        """What a command prints, and its status; TimeoutError after a time. Of what is `shown`, /logs is writable."""
        for place in (Path(f"{self._root}{each}") for each in ("/etc", *shown)):
            if place.is_symlink() or place.is_file():
                place.unlink()  # the model's: what is shown would be mounted where it leads
        binds = [("--bind", str(self._root), "/")]
        binds += [("--ro-bind", each, each) for each in SYSTEM_PATHS if Path(each).exists()]
        binds += [("--bind" if each == "/logs" else "--ro-bind", str(folder), each) for each, folder in shown.items()]
        steps = [each for each in self._task.steps if "/environment" in shown or not each.startswith("copy ")]
        script = "\n".join([PREPARE, *steps, "set +e", command])
        with tempfile.TemporaryFile() as output:
            try:
                done = subprocess.run(
                    ["bwrap", *itertools.chain(*binds), *ISOLATION, "bash", "-c", script],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=timeout_s, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise TimeoutError(f"{command[:80]!r} was not done after {timeout_s:g} s and was stopped") from error
            output.seek(0)
            text = output.read(100 * MAX_CHARS).decode(errors="replace").strip("\n")
        return shorten_text(text, MAX_CHARS), done.returncode

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def _answer(self, call: Segment, ends_at: float) -> str:
        command = (call.arguments or {}).get("command")
        if call.tool != "bash" or not isinstance(command, str):
            return "Error: the only tool is bash, with a command."
        try:
            text, status = self.run(command, max(ends_at - time.monotonic(), 0.0), {})
        except TimeoutError:
            return f"Error: {command[:80]!r} was stopped: the commands of a reply have {COMMAND_TIMEOUT_S:g} s together"
        return f"{text}\n[status {status}]".lstrip() if status else text
