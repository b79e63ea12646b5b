"""ScienceWorld: experiments in a simulated school, one action a reply. Its simulator runs in Java, a process each.

A few processes serve all rollouts, an episode at a time each; they stay warm, are replaced after a number of episodes,
and end with this program. One that is lost is a `ServerLostError`, after which its rollout is made again. The
simulator is called directly: the package's Python class lists all valid actions after each step, which takes ten times
as long as the step.

The reward is the package's score, at least 0, from 0 to 1; each reply is paid what it changes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from subprocess import PIPE, STDOUT, Popen
from typing import Annotated, Any

from py4j.java_gateway import GatewayParameters, JavaGateway, find_jar_path
from py4j.protocol import Py4JError
from pydantic import Field
from scienceworld.constants import ID2TASK, JAR_PATH

from tunesmith.environments.episode import Places, TaskEnvironment
from tunesmith.errors import ConfigError, ServerLostError
from tunesmith.tools.tool import ToolInputError

JAVA_OPTIONS = ["-Xmx400m", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
"""Memory; and equal hashes of objects, which otherwise are random and order what the simulator lists."""
NUM_EPISODES = 200
"""Episodes after which a process is replaced."""
UNKNOWN_ACTION = "No known action matches that input."
NO_ACTIONS = ("reset task", "task", "wait1")
"""Commands of the simulator that are no actions in the world."""
PROMPT = (
    "{task}\n\nThe last line of each reply is your next action, one of these, in which OBJ is a thing or a place: "
    "{actions}.\n\n{look}"
)

logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it logs the traceback of each lost connection


def list_names() -> list[str]:
    return sorted(ID2TASK.values())


def load(member: str, *, simplification: str = "", num_processes: Annotated[int, Field(ge=1)] = 4) -> TaskEnvironment:
    if shutil.which("java") is None:
        raise ConfigError("environment scienceworld needs Java 8 or newer: apt-get install default-jre-headless")
    pool = load_pool(num_processes)
    seeds = itertools.count()
    rows = {
        split: [{"seed": next(seeds), "variation": each} for each in variations]
        for split, variations in read_variations(member, simplification, pool).items()
    }
    create = functools.partial(Experiment, pool, member, simplification)
    return TaskEnvironment(name=f"scienceworld:{member}", create=create, rows=rows, places=pool.places)


@functools.cache
def read_variations(task: str, simplification: str, pool: Pool) -> dict[str, list[int]]:
    """The variations of each of the package's own splits."""
    simulator = pool.take()
    with simulator.calls() as java:
        known = ["easy", *java.getPossibleSimplifications().split(", ")]
        if unknown := [each for each in filter(None, simplification.split(",")) if each not in known]:
            raise ConfigError(f"environment.args.simplification: {unknown[0]!r} is none of {', '.join(known)}")
        java.load(task, 0, simplification, False)
        variations = {"train": list(java.getVariationsTrain()), "test": list(java.getVariationsTest())}
    pool.give_back(simulator)
    return variations


class Simulator:
    """A process with a simulator."""

    def __init__(self) -> None:
        paths = os.pathsep.join((find_jar_path(), JAR_PATH))
        # it ends when its input is closed, as the end of this program does
        command = ["java", *JAVA_OPTIONS, "-classpath", paths, "py4j.GatewayServer", "--die-on-broken-pipe", "0"]
        folder = tempfile.mkdtemp(prefix="tunesmith-scienceworld-")  # it writes files where it starts
        self.process = Popen(command, cwd=folder, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True)
        self.end = weakref.finalize(self, end_process, self.process, folder, os.getpid())
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        # what it prints is dropped, which else would fill the pipe and wait for ever
        threading.Thread(target=deque, args=(self.process.stdout, 0), daemon=True).start()
        # with memory management, objects that are freed after the process has ended would log errors
        parameters = GatewayParameters(port=port, auto_field=True, enable_memory_management=False)
        self._gateway = JavaGateway(gateway_parameters=parameters)
        self._java: Any = self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self.num_episodes = 0
        self.is_busy = False
        """Whether a call has not returned."""

    @contextlib.contextmanager
    def calls(self) -> Iterator[Any]:
        """The Java object, for calls; a process that fails in them is lost."""
        self.is_busy = True
        try:
            yield self._java
        except (Py4JError, OSError) as error:
            self.end()
            raise ServerLostError(f"the process of ScienceWorld is lost: {error}") from error
        self.is_busy = False


def end_process(process: Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() == owner:  # else in a forked copy of this program
        with process:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


class Pool:
    """Simulators that no episode uses. `places` lets as many episodes begin as there are processes."""

    def __init__(self, number: int) -> None:
        self.places = Places(number)
        self._idle: list[Simulator] = []

    def take(self) -> Simulator:
        """An idle simulator that lives, or a new one."""
        with contextlib.suppress(IndexError):
            while (simulator := self._idle.pop()).process.poll() is not None:
                simulator.end()
            return simulator
        try:
            return Simulator()
        except (OSError, ValueError, Py4JError) as error:
            raise ServerLostError(f"the process of ScienceWorld does not start: {error}") from error

    def give_back(self, simulator: Simulator) -> None:
        """Keep a simulator for the next episode, unless it still computes or is to be replaced."""
        simulator.num_episodes += 1
        if simulator.is_busy or simulator.num_episodes >= NUM_EPISODES:
            simulator.end()
        else:
            self._idle.append(simulator)


load_pool = functools.cache(Pool)


class Experiment:
    """One episode."""

    is_deterministic = True

    def __init__(self, pool: Pool, task: str, simplification: str) -> None:
        self._pool, self._task, self._simplification = pool, task, simplification
        self._simulator: Simulator | None = None
        self._score = 0.0

    def reset(self, task: Mapping[str, Any]) -> str:
        self._simulator = self._pool.take()
        with self._simulator.calls() as java:
            if problem := java.load(self._task, int(task["variation"]), self._simplification, False):
                raise ValueError(problem)
            java.reset()
            actions = ", ".join(each for each in java.getPossibleActions() if each not in NO_ACTIONS)
            goal = java.freeActionTaskDesc().removeprefix("Task Description:\n").strip()
            return PROMPT.format(task=goal, actions=actions, look=java.step("look around"))

    def step(self, action: str) -> tuple[str, float, bool]:
        assert self._simulator is not None
        line = next((each.strip() for each in reversed(action.splitlines()) if each.strip()), "")
        with self._simulator.calls() as java:
            observation, score, is_done = java.step(line), java.getScore(), java.getCompleted()
        if observation == UNKNOWN_ACTION:
            raise ToolInputError(observation)
        before, self._score = self._score, min(max(score, 0.0), 1.0)
        return observation, self._score - before, bool(is_done or score < 0)

    def close(self) -> None:
        if self._simulator is not None:
            self._pool.give_back(self._simulator)
