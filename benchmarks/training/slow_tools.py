"""An agent whose tools sleep, with log-normal durations that are the same in every run."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from tunesmith.rollout.chat_model import ChatModel
from tunesmith.types import WorkflowOutput

DECK_SIZE = 1024


class Sleeps:
    """Log-normal durations in seconds, from shuffled decks of equally likely quantiles."""

    def __init__(self, *, median_s: float, p99_s: float, seed: int) -> None:
        sigma = math.log(p99_s / median_s) / statistics.NormalDist().inv_cdf(0.99) if median_s else 0.0
        quantiles = [statistics.NormalDist().inv_cdf((i + 0.5) / DECK_SIZE) for i in range(DECK_SIZE)]
        self._deck = [median_s * math.exp(sigma * z) for z in quantiles]
        self._rng = random.Random(seed)
        self._left: list[float] = []

    def draw(self) -> float:
        if not self._left:
            self._left = self._rng.sample(self._deck, DECK_SIZE)
        return self._left.pop()


async def use_tools(
    task: Mapping[str, Any], model: ChatModel, *, num_calls: int, draw_sleep: Callable[[], float]
) -> WorkflowOutput:
    """Model calls with a slow tool between them; a task with `is_warm` does not sleep."""
    messages = [{"role": "user", "content": task["question"]}]
    for call in range(num_calls + 1):
        reply = (await model(messages)).choices[0].message.content or ""
        if call < num_calls:
            await asyncio.sleep(0.0 if task.get("is_warm") else draw_sleep())
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "The tool is done."}]
    return WorkflowOutput(response=reply)
