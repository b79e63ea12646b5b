"""One call of a sandbox, as the pool sees it: sends code to a child, collects its output, and decides on the outcome.

Nothing that code writes is parsed: output is text, and an answer counts only if it is the random number of the call and
one known byte. The result has the text that the model reads, whole; `shorten_result` makes it as long as it may be.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tunesmith.config.tools import PythonToolSection
from tunesmith.tools.python.child import CPU_TIME, ERROR, MEMORY, NUM_NUMBER_BYTES, OK, READY
from tunesmith.tools.python.folder import SandboxFolder
from tunesmith.tools.python.worker import CONTINUE, CPU_LIMIT, DONE, END, ENDED, FORK, INTERRUPT, STOP, Report

Outcome = Literal["ok", "error", "timeout", "memory", "output_limit"]

NO_OUTPUT = "(no output: print the values that you need)"
STATE_LOST = "The session was restarted: its variables are lost."
RESTARTED = "The session was restarted before this call: its earlier variables are lost."


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """The result of a call. Every outcome is an observation for the model; trouble with the sandbox is an exception."""

    outcome: Outcome
    """ok; error: an exception, a non-zero exit status or a signal; timeout: wall or CPU time; memory: an uncaught
    MemoryError; output_limit."""
    text: str
    """What the model reads, at most `max_result_chars` characters of it."""
    stdout: str
    stderr: str
    is_state_lost: bool = False
    """Whether a session lost its variables with this call."""

    def __str__(self) -> str:
        return self.text


def shorten_result(result: PythonResult, limit: int, *, is_restarted: bool = False) -> PythonResult:
    """The result as the model reads it; `is_restarted`: the call before it was cancelled, and its session lost the
    variables."""
    text = f"{RESTARTED}\n{result.text}" if is_restarted else result.text
    return replace(result, text=shorten_text(text, limit))


def describe_outcome(outcome: Outcome, reason: str, settings: PythonToolSection) -> str:
    """One sentence on a broken limit or an abnormal end; empty if the traceback says all."""
    match outcome:
        case "timeout" if reason == "cpu":
            return f"Timeout: the code used more than {settings.cpu_s} s of CPU time and was stopped."
        case "timeout":
            return f"Timeout: the code ran longer than {settings.wall_s:g} s and was stopped."
        case "memory":
            return f"The code needs more than the {settings.memory_mb} MiB of memory that it may use."
        case "output_limit":
            return f"The code printed more than {settings.max_output_bytes} bytes and was stopped."
    return f"Error: {reason}." if reason else ""


def shorten_text(text: str, limit: int) -> str:
    """Leave out the middle, so that the first output and the error at the end stay."""
    if len(text) <= limit:
        return text
    mark = f"\n... [{len(text)} characters, the middle is left out] ...\n"
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head) :]


CHUNK_BYTES = 65536
INTERRUPT_GRACE_S = 2.0
"""Seconds that code of a session has after an interrupt at the time limit; then its process is killed."""
FOLDER_CHECK_S = 0.1
OUTCOMES: dict[bytes, Outcome] = {OK: "ok", ERROR: "error", MEMORY: "memory", CPU_TIME: "timeout"}


class SandboxLostError(Exception):
    """The worker ended, was killed, or did not answer."""


class Control:
    """The socket to a worker: commands there, reports back. `ConnectionError` if the worker has ended."""

    def __init__(self, connected: socket.socket, *, timeout_s: float) -> None:
        self._socket = connected
        self._socket.settimeout(timeout_s)
        self.fd = connected.fileno()

    def send(self, command: bytes, files: Sequence[int] = ()) -> None:
        if files:
            socket.send_fds(self._socket, [command], files)
        else:
            self._socket.sendall(command)

    def read_report(self) -> tuple[Report, list[int]]:
        """The next report, with the files that came with it; `TimeoutError` if there is none in time."""
        report, size = bytearray(), len(bytes(Report()))
        files: list[int] = []
        while len(report) < size:
            chunk, more, _, _ = socket.recv_fds(self._socket, size - len(report), 1)
            if not chunk:
                raise ConnectionResetError
            report += chunk
            files += more
        return Report.from_buffer(report), files

    def end_child(self) -> None:
        """Kill all processes of the call and wait for their end."""
        self.send(END)
        while self.read_report()[0].kind != DONE:
            pass

    def close(self) -> None:
        self._socket.close()


class Child:
    """A process forked by a worker, with the pipes to it."""

    def __init__(self, control: Control) -> None:
        self._is_ready = False
        far: list[int] = []
        self._files: list[int] = []
        try:
            for is_written in (True, False, False, False):
                read, write = os.pipe()
                self._files.append(write if is_written else read)
                far.append(read if is_written else write)
            control.send(FORK, far)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in far:
                os.close(fd)
        self.code, self.stdout, self.stderr, self.status = self._files

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the limits are set; the pipes do not block from then on."""
        if self._is_ready:
            return
        poller = select.poll()
        poller.register(self.status, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise TimeoutError
        if os.read(self.status, 1) != READY:
            raise SandboxLostError(os.read(self.stderr, 10_000).decode(errors="replace").strip())
        self._is_ready = True
        for fd in self._files:
            os.set_blocking(fd, False)

    def close(self) -> None:
        """Close the pipes, from which the process reads the end of its input."""
        while self._files:
            os.close(self._files.pop())


class Call:
    """Runs code in a child up to its limits."""

    def __init__(
        self,
        child: Child,
        control: Control,
        code: str,
        settings: PythonToolSection,
        *,
        folder: SandboxFolder,
        is_session: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._child = child
        self._control = control
        self._settings = settings
        self._folder = folder
        self._is_session = is_session
        self._clock = clock
        self.number = os.urandom(NUM_NUMBER_BYTES)
        """Known to the child from the start of the call, so that nothing written before is its answer."""
        encoded = code.encode("utf-8", "surrogatepass")
        self._unsent = memoryview(len(encoded).to_bytes(4, "big") + self.number + encoded)
        self._output = {child.stdout: bytearray(), child.stderr: bytearray()}
        self._answer = b""
        self._outcome: Outcome | None = None
        self._reason = ""
        self._is_interrupted = False
        self._has_answered = False
        self._next_check = clock() + FOLDER_CHECK_S
        self._poller = select.poll()

    def run(self, *, start_timeout_s: float) -> PythonResult:
        """The result; at its end the child waits for the next call of its session, or has ended."""
        self._child.wait_ready(start_timeout_s)
        self._send_code()
        if self._is_session:
            self._control.send(CONTINUE)
        self._watch()
        if self._is_session and self._has_answered and self._outcome != "output_limit":
            self._control.send(STOP)
            is_child_kept = True
        else:
            self._control.end_child()
            is_child_kept = False
        for fd in self._output:
            self._read_output(fd)
        return self._describe(is_child_kept=is_child_kept)

    def _watch(self) -> None:
        child, deadline = self._child, self._clock() + self._settings.wall_s
        # An answer is looked at before the end of the process that gave it.
        for fd in (child.status, *self._output, self._control.fd):
            self._poller.register(fd, select.POLLIN)
        if self._unsent:
            self._poller.register(child.code, select.POLLOUT)
        while self._outcome is None:
            left_s = deadline - self._clock()
            for fd, _ in self._poller.poll(max(0.0, min(left_s, FOLDER_CHECK_S)) * 1000):
                self._handle(fd)
            self._check_folder()
            if self._outcome is None and left_s <= 0:  # last: an answer counts that came while this thread waited
                deadline += INTERRUPT_GRACE_S
                self._time_out()

    def _handle(self, fd: int) -> None:
        if fd == self._control.fd:
            self._judge(self._control.read_report()[0])
        elif fd == self._child.code:
            self._send_code()
            if not self._unsent:
                self._poller.unregister(fd)
        elif not (self._read_status() if fd == self._child.status else self._read_output(fd)):
            # Closed by the code, or by the end of the process, which the worker reports.
            self._poller.unregister(fd)

    def _send_code(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._child.code, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent = self._unsent[:0]

    def _read_status(self) -> bool:
        """Read what there is; False at the end of the pipe."""
        try:
            chunk = os.read(self._child.status, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self._answer += chunk
        number, status = self._answer[:NUM_NUMBER_BYTES], self._answer[NUM_NUMBER_BYTES:]
        if status in OUTCOMES and number == self.number:
            self._has_answered = True
            self._outcome = "timeout" if self._is_interrupted else OUTCOMES[status]
            self._reason = "cpu" if status == CPU_TIME else ""
        elif status or not self.number.startswith(number):
            self._outcome, self._reason = "error", "the code wrote to the pipe of the sandbox"
        return bool(chunk)

    def _read_output(self, fd: int) -> bool:
        """Read what there is; False at the end of the pipe."""
        collected, limit = self._output[fd], self._settings.max_output_bytes
        with contextlib.suppress(BlockingIOError):
            while len(collected) <= limit:
                chunk = os.read(fd, CHUNK_BYTES)
                if not chunk:
                    return False
                collected += chunk
            if self._outcome in (None, "ok", "error", "memory"):
                self._outcome = "output_limit"
        return True

    def _time_out(self) -> None:
        """Interrupt code of a session, once; end any other code."""
        if self._is_session and not self._is_interrupted:
            self._is_interrupted = True
            self._control.send(INTERRUPT)
        else:
            self._outcome = "timeout"

    def _judge(self, report: Report) -> None:
        """The outcome of a process that ended without an answer."""
        self._read_status()
        if self._outcome is not None:
            return
        if report.kind == CPU_LIMIT:
            self._outcome, self._reason = "timeout", "cpu"
        elif report.kind == ENDED and self._is_interrupted:
            self._outcome = "timeout"
        elif report.kind == ENDED:
            self._judge_end(report)

    def _judge_end(self, report: Report) -> None:
        code = os.waitstatus_to_exitcode(report.wait_status)
        cpu_s = report.user_s + report.system_s + (report.user_us + report.system_us) / 1e6
        if code >= 0:
            self._outcome = "ok" if code == 0 else "error"
            self._reason = f"the process exited with status {code}" if code else ""
        elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= self._settings.cpu_s):
            self._outcome, self._reason = "timeout", "cpu"
        else:
            names = {each.value: each.name for each in signal.Signals}  # not of most real-time signals
            self._outcome, self._reason = "error", f"the process was killed by {names.get(-code, f'signal {-code}')}"

    def _check_folder(self) -> None:
        if self._outcome is not None or self._clock() < self._next_check:
            return
        self._next_check = self._clock() + FOLDER_CHECK_S
        if self._folder.is_full():
            self._outcome, self._reason = "error", "the temporary folder is full"

    def _describe(self, *, is_child_kept: bool) -> PythonResult:
        assert self._outcome is not None
        limit, is_state_lost = self._settings.max_output_bytes, self._is_session and not is_child_kept
        stdout, stderr = (bytes(part[:limit]).decode("utf-8", "replace") for part in self._output.values())
        parts = [stdout.strip("\n").rstrip()]
        if self._outcome != "ok":
            parts += [stderr.strip("\n"), describe_outcome(self._outcome, self._reason, self._settings)]
        if is_state_lost:
            parts.append(STATE_LOST)
        return PythonResult(
            outcome=self._outcome,
            text="\n".join(filter(None, parts)) or NO_OUTPUT,
            stdout=stdout,
            stderr=stderr,
            is_state_lost=is_state_lost,
        )
