"""Servers of other projects that `endpoint.py` compares with: vLLM's and transformers' own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How a server is started, and what it calls the model."""

    command: tuple[str, ...]
    model: str
    fields: Mapping[str, object]
    """Fields of a request that make every reply as long as `max_tokens`, where the server has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedPeer:
    """A server that runs."""

    ready_s: float
    """Seconds until it answered."""
    output: IO[bytes]

    def read_end(self, num_lines: int) -> list[str]:
        """The last lines of its output; of a slow transformers server they are stack traces."""
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()[-num_lines:]
        return [re.sub(r'File ".*/([^/]+/[^/]+)"', r'File "\1"', line) for line in lines]


class PeerError(Exception):
    """A server that did not start; the message has the end of its output."""


def build_peer(name: str, *, model: str, port: int, device: str, num_agents: int) -> Peer:
    """The command of a server."""
    if name == "vllm":
        command = [
            "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port),
            "--served-model-name", "policy", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(num_agents),
            "--gpu-memory-utilization", "0.5", "--uvicorn-log-level", "warning",
        ]  # fmt: skip
        return Peer(command=tuple(command), model="policy", fields={"ignore_eos": True})
    program = (
        "import faulthandler; faulthandler.dump_traceback_later(60, repeat=True); "
        "from transformers.cli.transformers import main; main()"
    )
    command = ["-c", program, "serve", model, "--continuous-batching", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--device", device, "--dtype", "float32" if device == "cpu" else "bfloat16", "--log-level", "error"]
    # Without these the first request fills most of the memory with a cache and an attention mask over all of it.
    command += ["--cb-num-blocks", str(2 * max(num_agents, 32)), "--cb-max-batch-tokens", str(4 * MAX_MODEL_LEN)]
    return Peer(command=tuple(command), model=model, fields={})


@contextlib.contextmanager
def start_peer(peer: Peer, *, port: int, ready_s: float) -> Iterator[StartedPeer]:
    """Run a server until the block ends."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "TQDM_DISABLE": "1",
    }  # fmt: skip
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *peer.command], stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            while not _is_ready(port):
                seconds = time.perf_counter() - started
                if process.poll() is not None or seconds > ready_s:
                    reason = "ended" if process.poll() is not None else f"was not ready after {seconds:.0f} s"
                    raise PeerError(f"the server {reason}: {_read_end(output)}")
                time.sleep(0.5)
            yield StartedPeer(ready_s=time.perf_counter() - started, output=output)
        finally:
            _end(process)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            continue


def _read_end(output: object) -> str:
    output.seek(0)  # type: ignore[attr-defined]
    lines: Sequence[str] = output.read().decode(errors="replace").splitlines()  # type: ignore[attr-defined]
    return " | ".join(line.strip() for line in lines[-6:] if line.strip())[-1000:]


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
