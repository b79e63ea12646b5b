"""`PythonTool`: the Python tool of agents, stateless or with sessions.

`await tool(code)` runs code in a fresh process and returns a `PythonResult`. An error, a timeout or a broken limit of
the code is a result with a text for the model; trouble with the sandbox itself raises `SandboxError`, which makes the
rollout a `Failure`. `async with tool.session() as session` keeps variables and files between calls, as in a notebook.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from tunesmith.config.tools import PythonToolSection
from tunesmith.errors import SandboxError
from tunesmith.tools.python.call import PythonResult, SandboxLostError, shorten_result
from tunesmith.tools.python.pool import (
    CancelledCallError,
    OnStart,
    PendingCall,
    WorkerPool,
    run_in_threads,
)
from tunesmith.tools.python.worker_process import Launcher, WorkerProcess
from tunesmith.tools.tool import Run, Tool, ToolInputError, ToolResult, hold_time_limit


class PythonSession:
    """Runs code in one process, with a worker of its own; one call at a time. Close it, or use it in `async with`.

    At the time limit the code is interrupted, and the variables stay; code that does not react, or breaks another
    limit, loses them, and the result says so. A call that is cancelled loses them too, which the result of the next one
    says. `fork` makes a second session in the same state by running the code of the first again, and refuses if the
    results differ.
    """

    def __init__(self, settings: PythonToolSection, launcher: Launcher) -> None:
        self._settings = settings
        self._launcher = launcher
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tunesmith-python-session")
        self._worker: WorkerProcess | None = None
        self._is_closed = False
        self._is_cancelled = False
        """Whether the last call was cancelled: the next one gets another worker."""
        self.history: list[tuple[str, PythonResult]] = []
        """Code and result of each call since the session started or lost its variables."""

    async def __call__(self, code: str, *, on_start: OnStart = lambda: None) -> PythonResult:
        """Run code; `SandboxError` if the worker is lost, and with it the state. `on_start`: the worker takes it."""
        if self._is_closed:
            raise SandboxError("this Python session is closed")
        is_restarted = self._is_cancelled
        try:
            call = PendingCall(on_start)
            result = await run_in_threads(self._threads, call, self._run, code, call, is_restarted)
        except asyncio.CancelledError:
            self._is_cancelled = True
            self.history.clear()
            raise
        except BaseException:
            self.close()
            raise
        self._is_cancelled = False
        if result.is_state_lost:
            self.history.clear()
        else:
            self.history.append((code, result))
        return shorten_result(result, self._settings.max_result_chars, is_restarted=is_restarted)

    async def fork(self) -> PythonSession:
        """A new session in the same state; `SandboxError` if the calls do not give the same results again."""
        if any(result.outcome == "timeout" for _, result in self.history):
            raise SandboxError("this Python session cannot be forked: a call reached the time limit, at no fixed point")
        forked = PythonSession(self._settings, self._launcher)
        forked._is_cancelled = self._is_cancelled
        try:
            for number, (code, result) in enumerate(self.history, 1):
                await forked(code)
                if forked.history[-1:] != [(code, result)]:
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

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def _run(self, code: str, call: PendingCall, is_restarted: bool) -> PythonResult:
        if is_restarted and self._worker is not None:
            self._worker.close()
            self._worker = None
        worker = self._worker = self._worker or self._launcher.start(is_session=True)
        if self._is_closed:
            worker.close()
            raise CancelledCallError
        try:
            result = call.run(worker, code)
        except SandboxLostError as error:
            raise SandboxError(f"the sandbox of a Python session was lost: {error}") from error
        if not worker.is_usable:
            worker.close()
            self._worker = None
        return result


MAX_CODE_CHARS = 1_000_000


class PythonTool:
    """Runs model-written Python in sandboxes.

    Args:
        settings (`PythonToolSection`, *optional*):
            Isolation, number of workers, packages and limits; see `docs/tools.md`.

    One tool serves all rollouts of a process, from any event loop. Workers start with the first calls, or with
    `start`. They end with `close`, or when the process ends.
    """

    def __init__(self, settings: PythonToolSection | None = None) -> None:
        self.settings = settings or PythonToolSection()
        self._pool = WorkerPool(self.settings)

    async def __call__(self, code: str, *, on_start: OnStart = lambda: None) -> PythonResult:
        """Run code in a process that ends with the call; `on_start` is called when a worker takes it."""
        return shorten_result(await self._pool.run(code, on_start), self.settings.max_result_chars)

    def build_tool(self, *, is_session: bool = False) -> Tool:
        """The `Tool` of an environment; with `is_session`, variables are kept during a rollout.

        The sandbox has its own time limit. Neither it nor a `timeout_s` of the tool counts the time that a call waits
        for a worker, which `max_wait_s` bounds.
        """

        def bind(python: PythonTool | PythonSession) -> Run:
            async def run(code: str) -> ToolResult:
                if len(code) > MAX_CODE_CHARS:
                    raise ToolInputError(f"the code is longer than {MAX_CODE_CHARS} characters")
                result = await python(code, on_start=hold_time_limit())
                return ToolResult(text=result.text, failure="" if result.outcome == "ok" else result.outcome)

            return run

        @asynccontextmanager
        async def open_session() -> AsyncIterator[Run]:
            async with self.session() as session:
                yield bind(session)

        packages = " and ".join(["the standard library", *self.settings.packages])
        state = "Variables are kept between calls." if is_session else "Each call starts without variables."
        return Tool(
            name="python",
            description=(
                f"Run Python {sys.version_info.major}.{sys.version_info.minor} code and return what it prints; the "
                f"value of a last expression is printed too. {state} There are {packages}, no network, and at most "
                f"{self.settings.wall_s:g} s and {self.settings.memory_mb} MiB."
            ),
            parameters={
                "type": "object",
                "properties": {"code": {"type": "string", "description": "Python code."}},
                "required": ["code"],
            },
            text_argument="code",
            run=bind(self),
            timeout_s=None,
            max_result_chars=self.settings.max_result_chars,
            open_session=open_session if is_session else None,
        )

    def session(self) -> PythonSession:
        """A stateful session, with a worker of its own that starts with the first call."""
        return PythonSession(self.settings, self._pool.launcher)

    async def start(self) -> None:
        """Start all workers; `SandboxError` if code cannot be isolated on this machine."""
        await self._pool.start()

    def close(self) -> None:
        """End all workers."""
        self._pool.close()

    async def __aenter__(self) -> PythonTool:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()
