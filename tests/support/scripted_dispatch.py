"""A dispatcher on a scripted engine: the test decides which request gets its next token."""

from __future__ import annotations

import asyncio
import random

from chat_templates import QWEN25
from fakes import FakeEngine, build_chat_tokenizer
from tunesmith.rollout.dispatcher import Dispatcher, DispatchPlan
from tunesmith.types import Completion, WorkflowOutput

TOKENIZER = build_chat_tokenizer(QWEN25)
GROUP_SIZE, BATCH_SIZE, NUM_TASKS = 2, 2, 7


class StepwiseEngine(FakeEngine):
    """Samples a token only in `sample_one`; each has the version of the weights at that moment."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, lambda prompt, sampling, order: [])
        self.waiting: list[asyncio.Future[None]] = []
        self.is_paused = True

    async def generate(self, prompt_ids, sampling, *, order=(), on_tokens=None) -> Completion:
        ids, versions = [], []
        for token_id in (20 + sampling.seed % 200, 30, TOKENIZER.eos_token_id):
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
            ids.append(token_id)
            versions.append(self.policy_version)
            on_tokens([token_id], [-1.0])
        return Completion(
            sampled_ids=tuple(ids), logprobs=(-1.0,) * 3, policy_versions=tuple(versions), stop_reason="eos"
        )

    def sample_one(self, rng: random.Random) -> None:
        """Sample the next token of one request, chosen at random."""
        self.waiting = [each for each in self.waiting if not each.done()]
        if self.waiting and not self.is_paused:
            self.waiting.pop(rng.randrange(len(self.waiting))).set_result(None)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self, policy_version, *, keeps_cache=False) -> None:
        self.policy_version, self.is_paused = policy_version, False

    def hold(self) -> None:
        self.pause()

    def release(self) -> None:
        self.pause()


def build_plan(max_staleness: int, **options) -> DispatchPlan:
    given = {"seed": 0, "group_size": GROUP_SIZE, "batch_size": BATCH_SIZE, "total_steps": 100} | options
    return DispatchPlan(max_staleness=max_staleness, **given)


def count(dispatcher: Dispatcher) -> dict[str, float]:
    return dispatcher.compute_staleness([], [], policy_version=0)


async def talk(task, model):
    """Tasks make one to three calls; every fifth fails."""
    messages = [{"role": "user", "content": str(task["number"])}]
    for _ in range(1 + task["number"] % 3):
        reply = await model(messages)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
        messages += [{"role": "user", "content": "more"}]
    if task["number"] == 5:
        raise ValueError("five")
    return WorkflowOutput(reward=float(task["number"] % 2))
