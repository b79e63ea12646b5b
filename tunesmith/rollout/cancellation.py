"""Cancelling tasks of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended: what they hold is free then."""
    pending = [each for each in tasks if not each.done()]
    for each in pending:
        each.cancel()
    if pending:
        await asyncio.wait(pending)
