"""Agents that ask questions through the OpenAI-compatible endpoint in this process: their rate, and what a call costs.

The processor's time is that of the whole process, so that it counts what no profile of a part would show.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tunesmith.chat.renderer import Renderer
from tunesmith.config import EngineSection, ModelSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.load import load_tokenizer
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.groups import run_groups
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.storage import load_json_lines
from tunesmith.types import Group, JudgeOutput, Sampling, Task, WorkflowOutput

GROUP = 8
MAX_MODEL_LEN = 1024
STAGES = {
    "build a client": ("client.py", "bind"),
    "read the request": ("request.py", "parse_request"),
    "render and tokenize": ("render.py", "render"),
    "decode the answer": ("render.py", "decode"),
    "engine": ("engine.py", "step"),
}
"""What a call goes through -> file and function whose time is counted, all below it included."""


async def ask(task: Mapping[str, Any], model: ChatModel) -> WorkflowOutput:
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content or "")


async def judge(task: Mapping[str, Any], response: str) -> JudgeOutput:
    return JudgeOutput(reward=float(len(response)))


def measure_agents(model: PreTrainedModel, arguments: argparse.Namespace, *, num_agents: int) -> dict[str, Any]:
    """Medians over the repeats; agents come in groups of eight that ask the same."""
    tokenizer = load_tokenizer(arguments.model)
    settings = EngineSection(
        max_num_seqs=num_agents,
        kv_cache_tokens=num_agents * MAX_MODEL_LEN // 2,
        cuda_decode=arguments.cuda_decode,
        decode_block=arguments.decode_block,
    )
    engine = LocalEngine(model, tokenizer, settings, max_model_len=MAX_MODEL_LEN)
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
        build_model=_build_model,
    )
    rows = load_json_lines(Path(arguments.questions))[: num_agents // GROUP]
    tasks = [Task(task_id=f"q/{i}", index=i, row=row) for i, row in enumerate(rows)]

    def run(step: int) -> list[Group]:
        engine.pause()
        engine.resume(step)
        agent = Agent(workflow=ask, judge=judge, timeout_s=600.0)
        return run_lockstep(
            run_groups(
                tasks, group_size=GROUP, agent=agent, model=service, seed=0, step=step, max_concurrency=num_agents
            )
        )

    rates, cpu_us, lengths = [], [], []
    for step in range(arguments.repeats + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        groups = run(step)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        turns = [turn for group in groups for run_ in group.trajectories for turn in run_.turns]
        assert len(turns) == len(tasks) * GROUP, "a call failed"
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
        "profiled_us_per_call": compute_stages(profiler, len(tasks) * GROUP),
    }


def _build_model(endpoint: Any) -> ChatModel:
    return ChatModel(endpoint)


def compute_stages(profiler: cProfile.Profile, num_calls: int) -> dict[str, float]:
    """Microseconds a call of each stage; the profile itself makes them about three times as long."""
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    found = {}
    for stage, (file, function) in STAGES.items():
        seconds = sum(row[3] for (path, _, name), row in stats.items() if Path(path).name == file and name == function)
        found[stage] = seconds / num_calls * 1e6
    found["all"] = sum(row[2] for row in stats.values()) / num_calls * 1e6
    return found
