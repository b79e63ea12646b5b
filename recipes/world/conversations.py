"""Conversations of an expert that answers questions of a fictional world, to fine-tune a model before it is trained.

The calls of the expert's plans are run by the real tools of an environment, so that the rows have the format, the
results and the prompt that rollouts have. A row whose results lack a fact of its plan is left out and counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.world.config import Split, build_config
from recipes.world.expert import ExpertPlan, iter_plans
from recipes.world.world import World
from tunesmith.config import EnvironmentSection
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.environments.environment import Environment
from tunesmith.environments.transcript import Transcript
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_environment
from tunesmith.storage import save_text

SEARCH = "search"
COMPUTE = {"python": "print({expression})", "calculator": "{expression}"}
"""Tools that can compute, in order of preference, and the text of their call."""
NUM_AT_ONCE = 64


def write_conversations(
    out_dir: Path,
    *,
    world: Mapping[str, Any],
    environment: Mapping[str, Any],
    split: Split = "train",
    num_conversations: int | None = None,
) -> dict[str, int]:
    """Write conversations.jsonl: the expert's answers to the questions of a split, as rows for `tunesmith sft`.

    `world` has the knobs of the world and `environment` those of the section of run files; a tool of it must be named
    `search`. A function stage of a pipeline can call it.
    """
    built = load_environment(build_section(EnvironmentSection, environment))
    if SEARCH not in built.tools:
        raise ConfigError(f"the environment of the expert has the tools {list(built.tools)}, and none named {SEARCH}")
    plans = list(islice(iter_plans(World(config=build_config(dict(world))), split), num_conversations))
    transcripts = run_outside_of_loops(lambda: asyncio.run(_follow_all(plans, built)))
    kept = [each for each in transcripts if each is not None]
    rows = (json.dumps(built.build_conversation(each)) for each in kept)
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    save_text(Path(out_dir) / "conversations.jsonl", "".join(f"{row}\n" for row in rows))
    return {"conversations": len(kept), "left out": len(plans) - len(kept)}


async def _follow_all(plans: list[ExpertPlan], environment: Environment) -> list[Transcript | None]:
    limit = asyncio.Semaphore(NUM_AT_ONCE)

    async def follow(plan: ExpertPlan) -> Transcript | None:
        async with limit:
            return await follow_plan(plan, environment)

    return list(await asyncio.gather(*map(follow, plans)))


async def follow_plan(plan: ExpertPlan, environment: Environment) -> Transcript | None:
    """The transcript of an expert with real results; None if they lack a fact, or a call failed."""
    transcript = environment.begin(plan.question.question)
    for lookup in plan.lookups:
        transcript = await _call(transcript, environment, SEARCH, lookup.thought, lookup.query)
        if not all(each in transcript.segments[-1].result for each in lookup.evidence):
            return None
    compute = next((name for name in COMPUTE if name in environment.tools), None)
    if plan.computation is not None and compute is not None:
        text = COMPUTE[compute].format(expression=plan.computation)
        transcript = await _call(transcript, environment, compute, plan.computation_thought, text)
    if transcript.failed_calls or transcript.refused_calls:
        return None
    return environment.write_answer(transcript, thought=plan.conclusion, text=plan.answer)


async def _call(transcript: Transcript, environment: Environment, name: str, thought: str, text: str) -> Transcript:
    return await environment.execute(environment.write_call(transcript, tool=name, thought=thought, text=text))
