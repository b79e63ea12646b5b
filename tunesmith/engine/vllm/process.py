"""Starts and stops the vLLM process, and explains in one sentence why it could not start or has ended.

The process leads a session of its own, so a Ctrl-C of the terminal does not reach it, and one signal ends all that it
has started. It ends with this process: when `stop` is called, at exit, and, since it watches its parent, after a
`kill -9` of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
"""Of the vLLM process. The last is what vLLM requires for handles of GPU memory, which only the parent sends."""
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Set by torchrun for the ranks of training; vLLM would take them for its own."""
LAUNCHER_PREFIX = "TORCHELASTIC_"
"""Of further variables; with one of them the ranks of vLLM would wait for the store of torchrun."""
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
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End the process, and whatever it has started."""
        atexit.unregister(self.stop)
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
    """A GPU's name in CUDA_VISIBLE_DEVICES, which may already restrict those of this process."""
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
