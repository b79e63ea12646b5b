"""Starts and stops the vLLM process, and explains in one sentence why it could not start or has ended.

The process leads a session of its own, so a Ctrl-C of the terminal does not reach it, and one signal ends all that it
has started. It ends with this process: when `stop` is called, which the engine does at exit, and, since it watches its
parent, after a `kill -9` of this process.

The socket to it carries frames of JSON. Everything runs in the thread of the event loop: while that thread waits in
`Connection.call` it reads the socket itself, so replies and tokens are handled in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.errors import EngineError

SERVER = Path(__file__).parent / "server.py"
EXIT_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 5.0
NUM_LOG_BYTES = 200_000
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
"""Variables of the vLLM process. vLLM requires the last one for handles of GPU memory; only the parent sends these."""
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Set by torchrun for the ranks of training; vLLM would take them for its own."""
LAUNCHER_PREFIX = "TORCHELASTIC_"
"""Start of the names of further variables; with one of them vLLM's ranks would wait for the store of torchrun."""
ROOT_CAUSE = "See root cause above"
START_CAUSES = {
    r"Free memory on device .*": "lower engine.vllm.gpu_memory_share, or use GPUs with more free memory",
    r".*No available memory for the cache blocks.*": "raise engine.vllm.gpu_memory_share",
    r".*(larger than the available KV cache memory|larger than the maximum number of tokens).*": (
        "raise engine.vllm.gpu_memory_share, or lower model.max_model_len"
    ),
    r".*(CUDA out of memory|OutOfMemoryError).*": "lower engine.vllm.gpu_memory_share, or use more GPUs",
    r".*(Address already in use|EADDRINUSE).*": "another process took a port of vLLM's ranks: start again",
    r"This model does not support `--runner generate`": "vLLM cannot sample from this model: set engine.kind=tunesmith",
    r"Model architectures .* (are not supported|failed to be inspected)": (
        "vLLM cannot sample from this model: set engine.kind=tunesmith"
    ),
    r".*(World size|world_size).*(available GPUs|larger).*": (
        "lower engine.tensor_parallel_size, or list more GPUs in engine.vllm.devices"
    ),
}
"""Lines of vLLM's log, and what to change."""


class VllmProcess:
    """A running vLLM process and the socket to it."""

    def __init__(
        self,
        folder: Path,
        arguments: Mapping[str, Any],
        *,
        python: str | None,
        devices: Sequence[int] | None,
        server: Path = SERVER,
    ) -> None:
        """Start the process; it answers once its model is loaded. `devices`: the GPUs that it may use, by index among
        those of this process; `folder`: importable there; `server`: the program."""
        self.folder = folder
        """Files for the process, and its log; removed when it is stopped, unless it has failed."""
        self.log_path = folder / "vllm.log"
        self.socket, other = socket.socketpair()
        variables = {
            name: value
            for name, value in os.environ.items()
            if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIX)
        }
        variables |= ENVIRONMENT | {"VLLM_RPC_BASE_PATH": str(folder)}
        variables["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        if devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(name_device, devices))
        with other, self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, str(server), str(other.fileno()), json.dumps(dict(arguments))],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        self.has_failed = False
        """Whether to keep the log."""
        self._is_killed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End the process, and whatever it has started."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        self._kill()
        if not self.has_failed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def explain_start(self, error: str) -> str:
        """Why the process has not started: its answer, or the cause in its log that the answer refers to."""
        self.has_failed = True
        if self.log_path.name in error:
            return error
        if ROOT_CAUSE in error:
            error = f"vLLM could not start: {explain_log(read_end(self.log_path))}"
        elif (cause := find_cause(error)) is not None:
            error = f"vLLM could not start: {cause}"
        return f"{error}; its log is {self.log_path}"

    def explain_end(self) -> str:
        """Why the process has ended, from the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        status = self._process.poll()
        self.has_failed = True
        self._kill()
        found = explain_log(read_end(self.log_path))
        return f"the vLLM process has ended (status {status}): {found}; its log is {self.log_path}"

    def _kill(self) -> None:
        """Kill what is left of the process group, once; its processes may outlive a leader that was killed."""
        if self._is_killed:
            return
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)


def name_device(index: int) -> str:
    """A GPU's name in CUDA_VISIBLE_DEVICES; the variable may already restrict the GPUs of this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if not visible else visible.split(",")[index].strip()


def read_end(path: Path) -> str:
    """The last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - NUM_LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def find_cause(line: str) -> str | None:
    """A known cause that a line names, with what to change."""
    for pattern, advice in START_CAUSES.items():
        if found := re.search(pattern, line):
            return f"{found.group()[:400].rstrip('. ')}; {advice}"
    return None


def explain_log(text: str) -> str:
    """The cause that a log names: a known one with what to change, else its last error, else its last line."""
    lines = [re.sub(r"^(\([^)]*\) )?(ERROR [^\]]*\] ?)?", "", line).strip() for line in text.splitlines()]
    if (cause := next(filter(None, map(find_cause, reversed(lines))), None)) is not None:
        return cause
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    known = [line for line in errors if ROOT_CAUSE not in line and "See stack trace" not in line]
    last = (known or errors or [line for line in lines if line] or ["its log is empty"])[-1]
    return last[:400]


CHUNK_BYTES = 2**20


class Connection:
    """Frames to and from the vLLM process, read by the event loop or by whoever waits for a reply."""

    def __init__(
        self,
        own: socket.socket,
        *,
        on_event: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
        explain_end: Callable[[], str],
    ) -> None:
        """`on_event` receives the events of requests, `on_end` is called once the process has closed the socket, and
        `explain_end` says why it has."""
        self._socket = own
        self._on_event, self._on_end, self._explain_end = on_event, on_end, explain_end
        self._buffer = bytearray()
        self._replies: dict[int, dict[str, Any]] = {}
        self._num_calls = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_open = True

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this event loop read the socket."""
        if loop is self._loop or not self.is_open:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
        self._loop = loop
        loop.add_reader(self._socket, self._read)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; raise EngineError if the process has ended."""
        body = json.dumps(message).encode()
        try:
            self._socket.sendall(len(body).to_bytes(4, "big") + body)
        except OSError as error:
            self._end()
            raise EngineError(self._explain_end()) from error

    def call(self, method: str, *, timeout_s: float, **arguments: Any) -> Any:
        """Call a method of the server and wait for its result, while the event loop stands still."""
        self._num_calls += 1
        seq = self._num_calls
        self.send({"op": "call", "seq": seq, "method": method, "arguments": arguments})
        return self.wait_for_reply(seq, work=method, timeout_s=timeout_s)

    def wait_for_reply(self, seq: int, *, work: str, timeout_s: float) -> Any:
        """The result of a call; reply 0 says that the engine has started."""
        self.wait_until(lambda: seq in self._replies, work=work, timeout_s=timeout_s)
        reply = self._replies.pop(seq)
        if "error" in reply:
            raise EngineError(f"vLLM could not {work.replace('_', ' ')}: {reply['error']}")
        return reply["result"]

    def wait_until(self, is_done: Callable[[], bool], *, work: str, timeout_s: float) -> None:
        """Read until `is_done()`; raise EngineError if the process ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if not self.is_open:
                raise EngineError(self._explain_end())
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineError(f"vLLM has not answered to {work.replace('_', ' ')} within {timeout_s:g} s")
            if select.select([self._socket], [], [], min(left_s, 1.0))[0]:
                self._read()

    def close(self) -> None:
        """Close the socket; the server ends."""
        if self.is_open:
            self._detach()
            self._socket.close()

    def _read(self) -> None:
        try:
            chunk = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # a call has read what the event loop was woken for
        except OSError:
            chunk = b""
        if not chunk:
            self._end()
            return
        self._buffer += chunk
        start = 0
        while len(self._buffer) - start >= 4:
            stop = start + 4 + int.from_bytes(self._buffer[start : start + 4], "big")
            if stop > len(self._buffer):
                break
            for event in json.loads(bytes(self._buffer[start + 4 : stop])):
                if "seq" in event:
                    self._replies[event["seq"]] = event
                else:
                    self._on_event(event)
            start = stop
        del self._buffer[:start]

    def _end(self) -> None:
        if self.is_open:
            self._detach()
            self._on_end()

    def _detach(self) -> None:
        self.is_open = False
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
