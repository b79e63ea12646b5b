"""Harbor: task folders whose image is not needed, as `harbor:FOLDER` of one task or of several.

The programs of this machine stand in for those of the image: under bubblewrap, without a network, in a file system
that has them read-only and the task's own folders. A Dockerfile may say FROM, WORKDIR, COPY and ENV; a task that needs
more is refused by what it needs, and so is one whose own solution is not paid 1, or doing nothing is. The model runs
commands with the tool `bash`; a reply without a call ends the episode. Then the tests run, in the same folders, with
files of theirs that the model has not seen.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tunesmith.environments.episode import Observation, Reply, TaskEnvironment, find_split, write_result
from tunesmith.environments.transcript import Segment
from tunesmith.errors import ConfigError, ToolUnavailableError
from tunesmith.tools.python.call import shorten_text

SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/passwd", "/etc/ld.so.cache")
RESERVED = {"", "usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "logs", "tests", "solution"}
"""Folders at the root in which a task can have no files."""
ISOLATION = "--unshare-all --die-with-parent --new-session --clearenv --proc /proc --dev /dev".split()  # noqa: SIM905
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
LIMITS = "ulimit -v 8388608 -f 262144; "
"""Memory of a process, and size of a file, in kB."""
COMMAND_TIMEOUT_S = 30.0
MAX_CHARS = 10_000
UNSUPPORTED = {
    "environment": ("docker_image", "gpus", "tpu", "mcp_servers", "healthcheck"),
    "agent": ("user",),
    "verifier": ("user", "environment_mode"),
}
BASH = {
    "name": "bash",
    "description": "Run a command in the task's folder. Files are kept from call to call, processes and variables not.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a task folder says."""

    folder: Path
    instruction: str
    workdir: PurePosixPath
    variables: Mapping[str, str]
    copies: Sequence[tuple[Path, PurePosixPath]]
    """Files and folders of `environment`, and where they go."""
    tests_timeout_s: float


def list_names() -> list[str]:
    return []


def load(member: str, args: dict[str, Any]) -> TaskEnvironment:
    path = Path(member).resolve()
    if args:
        raise ConfigError(f"environment.args.{next(iter(args))} has no effect with harbor, which has no arguments")
    if shutil.which("bwrap") is None:
        raise ConfigError("environment harbor needs bubblewrap: apt-get install bubblewrap")
    folders = [path] if (path / "task.toml").is_file() else sorted(each.parent for each in path.glob("*/task.toml"))
    if not folders:
        raise ConfigError(f"environment=harbor:{member}: neither the folder nor a folder in it has a task.toml")
    tasks = {each.name: check_task(each) for each in folders}
    rows: dict[str, list[Mapping[str, Any]]] = {"train": [], "test": []}
    for seed, name in enumerate(tasks):
        rows[find_split(name)].append({"seed": seed, "id": name})
    return TaskEnvironment(name=f"harbor:{member}", create=functools.partial(Episode, tasks), rows=rows)


@functools.cache
def check_task(folder: Path) -> Task:
    """The task of a folder, whose solution is paid 1, and doing nothing less."""
    task = read_task(folder)
    for solution in filter(Path.exists, (folder / "environment", folder / "solution" / "solve.sh")):
        sandbox, is_solved = Sandbox(task), solution.name == "solve.sh"
        try:
            if is_solved:
                sandbox.run("bash /solution/solve.sh", task.tests_timeout_s, {"/solution": solution.parent})
            reward, _ = sandbox.score()
        except (TimeoutError, ToolUnavailableError) as error:
            raise refuse(folder, str(error)) from error
        finally:
            sandbox.close()
        if (reward == 1) != is_solved:
            raise refuse(folder, f"{'its solution' if is_solved else 'doing nothing'} is paid {reward:g}")
    return task


def refuse(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"environment harbor: the task {folder.name!r} cannot run here, without its image: {why}")


def read_task(folder: Path) -> Task:
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
        text = (folder / "environment" / "Dockerfile").read_text().replace("\\\n", " ")
        instruction, _ = (folder / "instruction.md").read_text(), (folder / "tests" / "test.sh").read_text()
    except (OSError, ValueError) as error:
        raise refuse(folder, str(error)) from error
    wanted = [f"{name}.{key}" for name, keys in UNSUPPORTED.items() for key in keys if settings.get(name, {}).get(key)]
    wanted += ["steps"] * ("steps" in settings)
    if wanted or (folder / "environment" / "docker-compose.yaml").exists():
        raise refuse(folder, f"{wanted[0]} in its task.toml" if wanted else "it has a docker-compose.yaml")
    workdir, variables, copies = PurePosixPath("/"), {}, []
    for line in filter(None, (each.partition("#")[0].strip() for each in text.splitlines())):
        match shlex.split(line):
            case ["FROM", _]:
                pass
            case ["WORKDIR", place]:
                workdir /= place
            case ["ENV", *words] if all("=" in each for each in words):
                variables |= dict(each.split("=", 1) for each in words)
            case ["COPY", *sources, place] if sources and not sources[0].startswith(("-", "[")):
                for source in sources:
                    found = folder / "environment" / source.lstrip("/")
                    is_file_in = found.is_file() and (place.endswith(("/", ".")) or len(sources) > 1)
                    copies.append((found, workdir / place / (found.name if is_file_in else "")))
            case _:
                raise refuse(folder, f"{line[:80]!r} in its Dockerfile")
    for place in (workdir, *(each for _, each in copies)):
        if ".." in place.parts or (place.parts[1:2] or ("",))[0] in RESERVED:
            raise refuse(folder, f"its files are in {place}")
    if missing := [each for each, _ in copies if not each.exists()]:
        raise refuse(folder, f"there is no {missing[0]}")
    limit = float(settings.get("verifier", {}).get("timeout_sec", 600))
    return Task(
        folder=folder, instruction=instruction, workdir=workdir, variables=variables, copies=copies,
        tests_timeout_s=limit,
    )  # fmt: skip


class Sandbox:
    """The files of an episode, and commands among them."""

    def __init__(self, task: Task) -> None:
        self._task, self.root = task, Path(tempfile.mkdtemp(prefix="tunesmith-harbor-"))
        for place in ("tmp", "root", str(task.workdir)[1:]):
            (self.root / place).mkdir(parents=True, exist_ok=True)
        for source, target in task.copies:
            place = self.root / target.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, place, dirs_exist_ok=True) if source.is_dir() else shutil.copy(source, place)

    def run(self, command: str, timeout_s: float, shown: Mapping[str, Path]) -> str:
        """What a command prints; TimeoutError after a time. Of the folders `shown`, /logs is writable."""
        binds = [("--ro-bind", each, each) for each in SYSTEM_PATHS if Path(each).exists()]
        binds += [("--bind", str(each), f"/{each.name}") for each in self.root.iterdir()]
        binds += [("--bind" if each == "/logs" else "--ro-bind", str(folder), each) for each, folder in shown.items()]
        binds += [("--setenv", name, value) for name, value in (VARIABLES | {**self._task.variables}).items()]
        program = ["bwrap", *ISOLATION, *itertools.chain(*binds), "--chdir", str(self._task.workdir)]
        with tempfile.TemporaryFile() as output:
            try:
                done = subprocess.run(
                    [*program, "bash", "-c", LIMITS + command],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=timeout_s, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise TimeoutError(f"{command[:80]!r} was not done after {timeout_s:g} s and was stopped") from error
            output.seek(0)
            text = output.read(100 * MAX_CHARS).decode(errors="replace").strip("\n")
        return shorten_text(text, MAX_CHARS) + (f"\n[status {done.returncode}]" if done.returncode else "")

    def score(self) -> tuple[float, dict[str, float]]:
        """The reward that the tests write, and the numbers beside it. The model has not written to their folder."""
        with tempfile.TemporaryDirectory(prefix="tunesmith-harbor-") as logs:
            folder = Path(logs, "verifier")
            folder.mkdir()
            shown = {"/tests": self._task.folder / "tests", "/logs": Path(logs)}
            said = self.run("bash /tests/test.sh", self._task.tests_timeout_s, shown)
            try:
                path = folder / "reward.txt"
                values = json.loads((path if path.is_file() else path.with_suffix(".json")).read_text())
                numbers = {
                    key: float(each)
                    for key, each in (values if isinstance(values, dict) else {"reward": values}).items()
                }
                reward = numbers.pop("reward" if "reward" in numbers or len(numbers) != 1 else next(iter(numbers)))
                if not math.isfinite(reward):
                    raise ValueError(f"it is {reward}")
            except (OSError, ValueError, TypeError, KeyError) as error:
                name = self._task.folder.name
                raise ToolUnavailableError(
                    f"the tests of {name} wrote no reward ({error}) but said {said[-300:]!r}"
                ) from error
        return reward, numbers

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)  # a command that exceeded a time limit may still write


class Episode:
    """One episode."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self._sandbox: Sandbox | None = None
        self.tools = [{"type": "function", "function": BASH}]
        self.metrics: dict[str, float] = {}

    def reset(self, task: Mapping[str, Any]) -> str:
        self._sandbox = Sandbox(self._tasks[task["id"]])
        return self._tasks[task["id"]].instruction

    def step(self, action: Reply) -> tuple[Observation, float, bool]:
        if not action.calls:
            return "", self.finish(), True
        return [write_result(each.call_id, self._answer(each)) for each in action.calls], 0.0, False

    def finish(self) -> float:
        assert self._sandbox is not None
        reward, self.metrics = self._sandbox.score()
        return reward

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def _answer(self, call: Segment) -> str:
        command = (call.arguments or {}).get("command")
        if call.tool != "bash" or not isinstance(command, str):
            return "Error: the only tool is bash, with a command."
        assert self._sandbox is not None
        try:
            return self._sandbox.run(command, COMMAND_TIMEOUT_S, {})
        except TimeoutError as error:
            return f"Error: {error}"
