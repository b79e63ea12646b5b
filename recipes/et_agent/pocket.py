"""What the recipe needs besides stages: questions, an index, and demonstrations of an agent that wastes calls.

The pocket model has seen no text, so it cannot be prompted. Demonstrations take the place of its pretraining: they
have the format, and the habits that ET-Agent finds in prompted models: the same search twice, a search that does not
help, an answer without a search.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.config import EnvironmentSection
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.environments import Environment, Transcript
from tunesmith.pipeline.session.load_config import build_section
from tunesmith.pipeline.session.load_function import load_environment
from tunesmith.retrieval.index.build import build_index
from tunesmith.tasks.world import World
from tunesmith.tasks.world.config import build_config
from tunesmith.tasks.world.expert import Plan, iter_plans

SEARCH = "search"


def index_documents(out_dir: Path, *, documents: str) -> dict[str, int]:
    """Build the index that the tool `search` opens."""
    info = build_index(documents, str(out_dir / "index"))
    return {"passages": info.num_passages}


def split_questions(
    out_dir: Path, *, world: Mapping[str, Any], num_demonstrated: int, num_test: int, seed: int
) -> dict[str, int]:
    """Split the training questions of the world into `test.jsonl` and `train.jsonl`, of which `demonstrated.jsonl` has
    the first ones.

    Test questions are in no other part, but their entities are: a model of this size cannot copy names that it never
    saw.
    """
    plans = list(iter_plans(World(config=build_config(dict(world))), "train"))
    rows = [
        {"question": plan.question.question, "answer": list(plan.question.answer), "number": number}
        for number, plan in enumerate(plans)
    ]
    random.Random(f"{seed}/split").shuffle(rows)
    test, train = rows[:num_test], rows[num_test:]
    parts = {"test": test, "train": train, "demonstrated": train[:num_demonstrated]}
    for name, part in parts.items():
        (out_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return {f"{name} questions": len(part) for name, part in parts.items()}


def write_demonstrations(
    out_dir: Path,
    *,
    world: Mapping[str, Any],
    environment: Mapping[str, Any],
    questions: str,
    repeat_share: float,
    detour_share: float,
    seed: int,
    num_copies: int = 1,
) -> dict[str, int]:
    """Write conversations.jsonl: the expert's answers with calls that are not needed, all really executed.

    `repeat_share` of the demonstrations repeat the search, `detour_share` search for something else first.
    """
    built = load_environment(build_section(EnvironmentSection, environment))
    plans = list(iter_plans(World(config=build_config(dict(world))), "train"))
    numbers = [json.loads(line)["number"] for line in Path(questions).read_text(encoding="utf-8").splitlines()]
    chosen = [plans[number] for number in numbers for _ in range(num_copies)]
    names = [lookup.query for plan in plans for lookup in plan.lookups]

    async def follow_all() -> list[Transcript]:
        transcripts = []
        for place, plan in enumerate(chosen):
            rng = random.Random(f"{seed}/demonstration/{place}")
            queries = choose_queries(plan, names, rng, repeat_share=repeat_share, detour_share=detour_share)
            transcripts.append(await follow(plan, queries, built))
        return transcripts

    transcripts = run_outside_of_loops(lambda: asyncio.run(follow_all()))
    rows = [json.dumps(built.build_conversation(each)) for each in transcripts]
    (out_dir / "conversations.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return {"conversations": len(rows), "calls": sum(len(each.calls) for each in transcripts)}


def choose_queries(
    plan: Plan, names: Sequence[str], rng: random.Random, *, repeat_share: float, detour_share: float
) -> list[tuple[str, str]]:
    """Pairs of thought and query, with the wasted ones."""
    queries = [(lookup.thought, lookup.query) for lookup in plan.lookups]
    if rng.random() < detour_share:
        other = rng.choice(names)
        queries.insert(0, (f"I look up {other}.", other))
    if rng.random() < repeat_share:
        query = queries[-1][1]
        queries.append((f"I look up {query}.", query))
    return queries


async def follow(plan: Plan, queries: Sequence[tuple[str, str]], environment: Environment) -> Transcript:
    """The transcript with real results."""
    transcript = environment.begin(plan.question.question)
    for thought, query in queries:
        call = environment.protocol.write_call(thought, environment.tools[SEARCH], query, number=len(transcript.calls))
        transcript = await environment.execute(transcript.append(*call))
    answer = environment.protocol.write_answer(plan.conclusion, plan.answer)
    return replace(transcript.append(*answer), finish="answered")
