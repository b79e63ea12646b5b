"""Blocking work of a run: in a thread while workflows continue, or at once where none are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


class WorkThread:
    """One thread; work is done in the order of the calls."""

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare` runs once in the thread."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tunesmith-trainer", initializer=prepare)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work while the event loop continues; a cancellation waits for its end."""
        context = copy_context()
        running = asyncio.wrap_future(self._executor.submit(context.run, work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    def close(self) -> None:
        self._executor.shutdown()


class NoThread:
    """In place of a `WorkThread` where no workflow waits for the end of the work."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on the event loop's own thread."""
        return work()

    def close(self) -> None:
        return None
