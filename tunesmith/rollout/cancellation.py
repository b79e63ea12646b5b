"""Cancelling tasks of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended: what they hold is free then."""
    pending = [each for each in tasks if not each.done()]
    for each in pending:
        each.cancel()
    if pending:
        await asyncio.wait(pending)


async def gather_all(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results, in order. Nothing runs on if one of them fails or this is cancelled."""
    running = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*running)
    finally:
        await cancel_all(running)
