"""Long texts are tokenized in a thread, so that the event loop serves others meanwhile.

On an `EngineLoop` engines wait for calls in threads, so what is sampled does not depend on when the thread is done.
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
"""The loop's own may be full of tools that wait for the model's answer."""


async def run_tokenizer(renderer: Renderer, work: Callable[[], Result], *, num_characters: int) -> Result:
    """What `work`, which tokenizes so many characters, returns."""
    if num_characters <= LONG_CHARACTERS or not renderer.is_thread_safe:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_executor, work)
