"""An agent with a tool on a scripted engine, and its branching groups."""

from __future__ import annotations

from dataclasses import replace

from chat_templates import QWEN25
from fakes import FakeEngine, build_chat_tokenizer
from tunesmith.chat.renderer import Renderer
from tunesmith.config import BranchingSection
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.branching.tree import Branching
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.workers.group_runner import GroupRunner
from tunesmith.tool_log import record_call
from tunesmith.types import Distribution, Group, Sampling, Task, WorkflowOutput

TOKENIZER = build_chat_tokenizer(QWEN25)
TASKS = [Task(task_id=f"train/{i}", index=i, row={"question": f"q{i}"}) for i in range(3)]
NUM_ROUNDS = 3
"""Tool calls of each rollout; it makes one model call more."""
VOCAB_SIZE = 400
TIMEOUT_S = 120.0
"""No test waits for it. A rollout that a busy machine delays beyond it fails, and groups would differ."""


def sample_by_seed(prompt, sampling, order):
    """Three tokens chosen by the seed of the request."""
    words = [40 + (sampling.seed >> shift) % 80 for shift in (0, 16, 32)]
    return [*words, TOKENIZER.eos_token_id]


class ToolAgent:
    """Calls a tool after each of its first replies, and counts the calls that are really made."""

    def __init__(self, num_rounds: int = NUM_ROUNDS) -> None:
        self.num_rounds = num_rounds
        self.num_tool_calls = 0
        self.num_runs = 0

    async def __call__(self, task, model):
        self.num_runs += 1
        messages = [{"role": "user", "content": task["question"]}]
        for number in range(self.num_rounds + 1):
            reply = (await model(messages)).choices[0].message.content
            messages.append({"role": "assistant", "content": reply})
            if number < self.num_rounds:
                messages.append({"role": "user", "content": await self.call_tool(reply)})
        return WorkflowOutput(reward=float(sum(map(ord, reply)) % 7), metrics={"tool_calls": float(self.num_rounds)})

    async def call_tool(self, query: str) -> str:
        async def search() -> str:
            self.num_tool_calls += 1
            return f"found {query}"

        return await record_call("search", {"query": query}, search)


def build_service(script=sample_by_seed, *, temperature: float = 1.0) -> ModelService:
    engine = FakeEngine(TOKENIZER, script)
    sampling = Sampling(distribution=Distribution(temperature=temperature), max_tokens=50)
    return ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=sampling)


def build_branching(**knobs) -> Branching:
    return Branching(section=BranchingSection(**knobs), vocab_size=VOCAB_SIZE)


async def run_branched(
    workflow, branching, *, service=None, group_size=8, tasks=TASKS[:1], seed=7, max_concurrency=100, part=slice(None)
) -> list[Group]:
    """`part`: of the groups that are started together, those that run here."""
    requests = build_requests(tasks, size=group_size, seed=seed, step=1)
    requests = [replace(each, is_trained=True) for each in requests]
    agent = Agent(workflow=workflow, timeout_s=TIMEOUT_S)
    model = service or build_service()
    actors = Actors(engine=None, model=model, agent=agent, max_concurrency=max_concurrency, branching=branching)
    async with GroupRunner(actors) as runner:
        return await runner.run_all(requests[part])
