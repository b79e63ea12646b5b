"""A stateful session of the Python tool: one process, whose variables and files stay from call to call.

At the time limit the code is interrupted, and the variables stay; code that does not react, or breaks another limit,
loses them, and the result says so. A session has a worker of its own. `fork` makes a second session in the same state
by running the code of the first again, and refuses if the results differ.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from tunesmith.config.tools import PythonToolSection
from tunesmith.errors import SandboxError
from tunesmith.tools.python.call import SandboxLostError
from tunesmith.tools.python.pool import CancelledCallError, OnStart, PendingCall, ignore_start, run_in_threads
from tunesmith.tools.python.result import Answer, PythonResult, build_result
from tunesmith.tools.python.worker_process import Launcher, WorkerProcess


class PythonSession:
    """Runs code in one process; one call at a time. Close it, or use it as an async context manager."""

    def __init__(self, settings: PythonToolSection, launcher: Launcher) -> None:
        self._settings = settings
        self._launcher = launcher
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tunesmith-python-session")
        self._worker: WorkerProcess | None = None
        self._is_closed = False
        self.history: list[tuple[str, PythonResult]] = []
        """Code and result of each call since the session started or lost its variables."""

    async def __call__(self, code: str, *, on_start: OnStart = ignore_start) -> PythonResult:
        """Run code; `SandboxError` if the worker is lost, and with it the state. `on_start`: the worker takes it."""
        if self._is_closed:
            raise SandboxError("this Python session is closed, or a call of it was cancelled")
        call = PendingCall(on_start)
        try:
            async with asyncio.timeout(None) as limit:
                with call.waiting(limit):
                    answer = await run_in_threads(self._threads, call, self._run, code, call)
        except BaseException:
            self.close()
            raise
        result = build_result(answer, self._settings)
        if result.is_state_lost:
            self.history.clear()
        else:
            self.history.append((code, result))
        return result

    async def fork(self) -> PythonSession:
        """A new session in the same state; `SandboxError` if the calls do not give the same results again."""
        if any(result.outcome == "timeout" for _, result in self.history):
            raise SandboxError("this Python session cannot be forked: a call reached the time limit, at no fixed point")
        forked = PythonSession(self._settings, self._launcher)
        try:
            for number, (code, result) in enumerate(self.history, 1):
                if await forked(code) != result:
                    raise SandboxError(
                        f"this Python session cannot be forked: call {number} gave another result when it was run again"
                    )
        except BaseException:
            forked.close()
            raise
        return forked

    def close(self) -> None:
        """End the process of the session, without waiting for its end."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._worker is not None:
            self._worker.kill()
            self._threads.submit(self._worker.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> PythonSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, code: str, call: PendingCall) -> Answer:
        worker = self._worker = self._worker or self._launcher.start(is_session=True)
        if self._is_closed:
            worker.close()
            raise CancelledCallError
        call.attach(worker)
        try:
            answer = worker.run(code)
        except SandboxLostError as error:
            worker.close()
            if call.is_cancelled:
                raise CancelledCallError from error
            raise SandboxError(f"the sandbox of a Python session was lost: {error}") from error
        if not answer.is_worker_kept:
            worker.close()
            self._worker = None
        return answer
