"""Tokenizes long texts in a thread, so that they do not block the event loop.

On an `EngineLoop`, engines wait for calls in threads, so what is sampled does not depend on the thread's timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tunesmith.chat.renderer import Renderer
from tunesmith.chat.special_tokens import LONG_CHARACTERS

Result = TypeVar("Result")

_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tunesmith-tokenizer")
"""Separate from the loop's default executor, whose threads may all be occupied by tools that call the model."""


async def run_tokenizer(renderer: Renderer, work: Callable[[], Result], *, num_characters: int) -> Result:
    """Run `work`, which tokenizes `num_characters`, in a thread if the text is long."""
    if num_characters <= LONG_CHARACTERS or not renderer.is_thread_safe:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_executor, work)
