"""Wait for other ranks while the event loop of this one goes on; a collective would block it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from typing import Any, TypeVar

from tunesmith.cluster.ranks import Ranks

T = TypeVar("T")

INTERVAL_S = 0.5
"""Ranks that still work answer the others this often, so no collective waits for the work."""


async def end_together(ranks: Ranks, work: Awaitable[T]) -> T:
    """Do this rank's part of the work, then wait until all ranks have done theirs; all of them call this.

    Raises RankError if a rank ends meanwhile, and cancels the work. Nothing else may use the ranks' object group.
    """
    if ranks.is_alone:
        return await work
    running, is_done = asyncio.ensure_future(work), threading.Event()
    running.add_done_callback(lambda _: is_done.set())
    others = _watch(ranks, is_done)
    both: set[asyncio.Future[Any]] = {running, others}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if running.done():
            running.result()  # raises the error of this rank, which the others have not met
        others.result()
        return running.result()
    finally:
        others.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})


def _watch(ranks: Ranks, is_done: threading.Event) -> asyncio.Future[None]:
    """Ends once all ranks are done; in a thread of its own, which nothing at the end of the process waits for."""
    loop = asyncio.get_running_loop()
    all_done: asyncio.Future[None] = loop.create_future()
    all_done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the rank's own error comes first

    def settle(error: Exception | None) -> None:
        if not all_done.done():
            all_done.set_result(None) if error is None else all_done.set_exception(error)

    def watch() -> None:
        error: Exception | None = None
        try:
            while not all(ranks.all_gather_objects(is_done.is_set())):
                is_done.wait(INTERVAL_S)
        except Exception as found:  # noqa: BLE001 - raised where the rank waits
            error = found
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=watch, name="tunesmith-ranks", daemon=True).start()
    return all_done
