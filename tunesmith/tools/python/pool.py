"""Warm workers for many concurrent calls, from any event loop.

A call runs in a thread of the pool, so the event loop never blocks, calls beyond `num_workers` wait in order, and the
lockstep of an engine waits for short calls as for any function in a thread. Cancelling a call kills its worker; the
next call starts another. A worker that is lost in a call is replaced and the call repeated once; after that it is a
`SandboxError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tunesmith.config.tools import PythonToolSection
from tunesmith.errors import SandboxError
from tunesmith.tools.python.call import PythonResult, SandboxLostError
from tunesmith.tools.python.worker_process import Launcher, WorkerProcess

NUM_TRIES = 2

T = TypeVar("T")
OnStart = Callable[[], None]
"""Called on the event loop when a worker takes a call."""

logger = logging.getLogger(__name__)


class CancelledCallError(Exception):
    """The caller gave up; raised in the thread of the call, where nobody waits for it."""


class PendingCall:
    """A call in a thread that another thread may cancel; made on the event loop."""

    def __init__(self, on_start: OnStart) -> None:
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self.is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._on_start = on_start

    def run(self, worker: WorkerProcess, code: str) -> PythonResult:
        """Run the code in a worker, from the thread of the call; a worker that is lost is closed."""
        self._attach(worker)
        try:
            return worker.run(code)
        except SandboxLostError as error:
            worker.close()
            if self.is_cancelled:
                raise CancelledCallError from error
            raise

    def _attach(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._worker = worker
            if self.is_cancelled:
                worker.kill()
                return
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        if not self.is_cancelled:
            with contextlib.suppress(RuntimeError):  # the block of a time limit has ended: nobody waits
                self._on_start()

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._worker is not None:
                self._worker.kill()


class WorkerPool:
    """At most `num_workers` calls at a time, each in a worker that no other call uses meanwhile."""

    def __init__(self, settings: PythonToolSection) -> None:
        # without a number, one for each CPU that this process may use
        num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_workers = settings.num_workers or num_cpus
        self.launcher = Launcher(settings)
        self._idle: deque[WorkerProcess] = deque()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="tunesmith-python")
        self._num_workers = num_workers
        self._max_wait_s = settings.max_wait_s
        self._is_closed = False
        weakref.finalize(self, _close_workers, self._idle)

    async def run(self, code: str, on_start: OnStart = lambda: None) -> PythonResult:
        """The result of the code in a worker; `on_start` is called when a worker takes it."""
        limit = asyncio.timeout(self._max_wait_s)

        def start() -> None:
            limit.reschedule(None)  # it is on the time until the call starts
            on_start()

        call = PendingCall(start)
        try:
            async with limit:
                return await run_in_threads(self._threads, call, self._run, code, call)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SandboxError(
                f"a call of the Python tool waited {self._max_wait_s:g} s for one of {self._num_workers} workers: "
                "raise num_workers of the tool, or max_wait_s"
            ) from None

    async def start(self) -> None:
        """Start all workers, so that no call waits for one."""
        missing = self._num_workers - len(self._idle)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, self._start_idle) for _ in range(missing)))

    def close(self) -> None:
        """End all idle workers; a call that runs ends its own."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        _close_workers(self._idle)

    def _start_idle(self) -> None:
        self._idle.append(self.launcher.start())

    def _run(self, code: str, call: PendingCall) -> PythonResult:
        for number in range(1, NUM_TRIES + 1):
            # Idle workers may have been lost together, so the last try is in a new one.
            worker = self._take() if number < NUM_TRIES else self.launcher.start()
            try:
                result = call.run(worker, code)
            except SandboxLostError as error:
                logger.warning("a Python sandbox was lost in a call (try %d of %d): %s", number, NUM_TRIES, error)
                reason = error
                continue
            if worker.is_usable and not call.is_cancelled and not self._is_closed:
                self._idle.append(worker)
            else:
                worker.close()
            return result
        raise SandboxError(f"a Python sandbox was lost in {NUM_TRIES} tries of one call: {reason}")

    def _take(self) -> WorkerProcess:
        try:
            return self._idle.pop()
        except IndexError:
            return self.launcher.start()


async def run_in_threads(
    threads: ThreadPoolExecutor, call: PendingCall, function: Callable[..., T], *arguments: Any
) -> T:
    """Run a blocking function of a call in a thread; when the caller is cancelled, so is the call."""
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
    except asyncio.CancelledError:
        call.cancel()
        raise


def _close_workers(workers: deque[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()
    while workers:
        workers.pop().close()
