"""Throughput of agents that call the OpenAI-compatible endpoint in process, and the CPU cost of a call.

CPU time is that of the whole process, so it includes work that a profile of single functions would miss.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.chat.detokenize import Detokenizer
from tunesmith.chat.renderer import Renderer
from tunesmith.config import EngineSection, ModelSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.load import load_tokenizer
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.openai_server.client import InProcessClient
from tunesmith.rollout.openai_server.request import RequestParser
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.workers.group_runner import GroupRunner
from tunesmith.storage import load_json_lines
from tunesmith.types import Group, JudgeOutput, Sampling, Task, WorkflowOutput

GROUP_SIZE = 8
MAX_MODEL_LEN = 1024
CALL_PARTS: dict[str, Callable[..., Any]] = {
    "build a client": InProcessClient.bind,
    "read the request": RequestParser.parse,
    "render and tokenize": Renderer.render,
    "decode the answer": Detokenizer.decode,
    "engine": LocalEngine.step,
}
"""Part of a call -> the function whose cumulative time is reported."""


async def ask(task: Mapping[str, Any], model: ChatModel) -> WorkflowOutput:
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content or "")


async def judge(task: Mapping[str, Any], response: str) -> JudgeOutput:
    return JudgeOutput(reward=float(len(response)))


def load_tasks(arguments: argparse.Namespace, num_agents: int) -> list[Task]:
    """One question for each group of agents."""
    rows = load_json_lines(Path(arguments.questions))[: num_agents // GROUP_SIZE]
    return [Task(task_id=f"q/{i}", index=i, row=row) for i, row in enumerate(rows)]


def build_agents(
    engine: LocalEngine, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace, tasks: Sequence[Task]
) -> Callable[[int], list[Group]]:
    """A function that runs all agents at once in a given step."""
    section = ModelSection(path=arguments.model)
    renderer = Renderer(
        tokenizer,
        tool_call_parser=section.tool_call_parser,
        reasoning_parser=section.reasoning_parser,
        enable_thinking=section.enable_thinking,
    )
    service = ModelService(
        engine,
        renderer,
        model_name="policy",
        sampling=Sampling(max_tokens=arguments.new_tokens),
        build_model=lambda endpoint: ChatModel(endpoint),
    )
    agent = Agent(workflow=ask, judge=judge, timeout_s=600.0)
    actors = Actors(engine=None, model=service, agent=agent, max_concurrency=len(tasks) * GROUP_SIZE)

    async def run_groups(step: int) -> list[Group]:
        async with GroupRunner(actors) as runner:
            return await runner.run_all(build_requests(tasks, size=GROUP_SIZE, seed=0, step=step))

    return lambda step: run_lockstep(run_groups(step))


def measure_agents(model: PreTrainedModel, arguments: argparse.Namespace, *, num_agents: int) -> dict[str, Any]:
    """Medians over the repeats; agents run in groups of eight that ask the same question."""
    tokenizer = load_tokenizer(arguments.model)
    settings = EngineSection(
        max_num_seqs=num_agents,
        kv_cache_tokens=num_agents * MAX_MODEL_LEN // 2,
        cuda_decode=arguments.cuda_decode,
        decode_block=arguments.decode_block,
    )
    engine = LocalEngine(model, tokenizer, settings, max_model_len=MAX_MODEL_LEN)
    tasks = load_tasks(arguments, num_agents)
    run_agents = build_agents(engine, tokenizer, arguments, tasks)

    def run(step: int) -> list[Group]:
        engine.pause()
        engine.resume(step)
        return run_agents(step)

    rates, cpu_us, lengths = [], [], []
    for step in range(arguments.repeats + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        groups = run(step)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        turns = [turn for group in groups for run_ in group.trajectories for turn in run_.turns]
        assert len(turns) == len(tasks) * GROUP_SIZE, "a call failed"
        if step:
            num_tokens = sum(len(turn.sampled_ids) for turn in turns)
            rates.append(num_tokens / seconds)
            cpu_us.append(cpu_s / len(turns) * 1e6)
            lengths.append(num_tokens / len(turns))
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(run, arguments.repeats + 1)
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_all": rates,
        "tokens_per_call": statistics.median(lengths),
        "cpu_us_per_call": statistics.median(cpu_us),
        "profiled_us_per_call": compute_part_costs(profiler, len(tasks) * GROUP_SIZE),
    }


def compute_part_costs(profiler: cProfile.Profile, num_calls: int) -> dict[str, float]:
    """Microseconds per call of each part; profiling makes them about three times as long."""
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    costs = {}
    for part, function in CALL_PARTS.items():
        code = function.__code__
        row = stats.get((code.co_filename, code.co_firstlineno, code.co_name))
        costs[part] = 0.0 if row is None else row[3] / num_calls * 1e6
    costs["all"] = sum(row[2] for row in stats.values()) / num_calls * 1e6
    return costs
