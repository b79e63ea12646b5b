"""What the recipes need besides stages: an index, questions, and demonstrations of an agent that wastes calls: the same
search twice, and searches that do not help, as ET-Agent finds in prompted models."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.world import World
from recipes.world.config import build_config
from recipes.world.expert import ExpertPlan, iter_plans
from tunesmith.config import EnvironmentSection
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.environments import Environment, Transcript
from tunesmith.retrieval.index.search import build_index
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_environment

SEARCH = "search"
Queries = Sequence[tuple[str, str]]
"""Pairs of a thought and what to search for."""


def index_documents(out_dir: Path, *, documents: str) -> dict[str, int]:
    """Build the index that the tool `search` opens."""
    info = build_index(documents, str(out_dir / "index"))
    return {"passages": info.num_passages}


def split_questions(
    out_dir: Path, *, world: Mapping[str, Any], num_train: int, num_test: int, seed: int, needs_name: bool = False
) -> dict[str, int]:
    """Split the training questions of the world into `train.jsonl`, `test.jsonl`, and `demonstrated.jsonl`, the rest.

    No two parts ask for the same fact, but they name the same entities. `num_train` and `num_test` are reached with the
    last fact's questions. `needs_name` leaves out questions that do not name what they ask about ("which work did X
    write?"), for which the name alone is no good search.
    """
    plans = list(iter_plans(World(config=build_config(dict(world))), "train"))
    by_fact: defaultdict[str, list[int]] = defaultdict(list)
    for number, plan in enumerate(plans):
        asked = plan.question.facts[-1]
        if needs_name and plan.lookups[-1].query not in plan.question.question:
            continue
        by_fact[f"{asked.subject} {asked.relation}"].append(number)
    facts = list(by_fact.values())
    random.Random(f"{seed}/split").shuffle(facts)
    parts: dict[str, list[int]] = {"test": [], "train": [], "demonstrated": []}
    sizes = {"test": num_test, "train": num_train, "demonstrated": len(plans)}
    for numbers in facts:
        part = next(name for name, found in parts.items() if len(found) < sizes[name])
        parts[part] += numbers
    for name, numbers in parts.items():
        random.Random(f"{seed}/{name}").shuffle(numbers)
        rows = (
            {"question": plans[at].question.question, "answer": list(plans[at].question.answer), "number": at}
            for at in numbers
        )
        (out_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {f"{name} questions": len(numbers) for name, numbers in parts.items()}


def write_demonstrations(
    out_dir: Path,
    *,
    world: Mapping[str, Any],
    environment: Mapping[str, Any],
    questions: str,
    seed: int,
    repeat_share: float = 0.0,
    detour_share: float = 0.0,
) -> dict[str, int]:
    """Write conversations.jsonl: an answer to each question, with real results of calls.

    `repeat_share` of the demonstrations repeat the last search, `detour_share` search for something else first.
    Where the expert's own searches do not find the facts there is no demonstration: it would teach to make them up.
    """
    built = load_environment(build_section(EnvironmentSection, environment))
    plans = list(iter_plans(World(config=build_config(dict(world))), "train"))
    numbers = [json.loads(line)["number"] for line in Path(questions).read_text(encoding="utf-8").splitlines()]
    chosen = [plans[number] for number in numbers]
    names = [lookup.query for plan in plans for lookup in plan.lookups]

    async def demonstrate() -> list[Transcript]:
        transcripts = []
        for place, plan in enumerate(chosen):
            rng = random.Random(f"{seed}/demonstration/{place}")
            queries = choose_queries(plan, names, rng, repeat_share=repeat_share, detour_share=detour_share)
            transcript = await search(plan, queries, built)
            if has_evidence(plan, transcript):
                transcripts.append(built.write_answer(transcript, thought=plan.conclusion, text=plan.answer))
        return transcripts

    transcripts = run_outside_of_loops(lambda: asyncio.run(demonstrate()))
    rows = [json.dumps(built.build_conversation(each)) for each in transcripts]
    (out_dir / "conversations.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return {
        "conversations": len(rows),
        "without evidence, left out": len(chosen) - len(rows),
        "calls": sum(len(each.calls) for each in transcripts),
    }


def choose_queries(
    plan: ExpertPlan, names: Sequence[str], rng: random.Random, *, repeat_share: float, detour_share: float
) -> Queries:
    """The expert's searches with the wasted ones."""
    queries = [(lookup.thought, lookup.query) for lookup in plan.lookups]
    if rng.random() < detour_share:
        other = rng.choice(names)
        queries.insert(0, (f"I look up {other}.", other))
    if rng.random() < repeat_share:
        query = queries[-1][1]
        queries.append((f"I look up {query}.", query))
    return queries


async def search(plan: ExpertPlan, queries: Queries, environment: Environment) -> Transcript:
    """The calls with their real results."""
    transcript = environment.begin(plan.question.question)
    for thought, query in queries:
        call = environment.write_call(transcript, tool=SEARCH, thought=thought, text=query)
        transcript = await environment.execute(call)
    return transcript


def has_evidence(plan: ExpertPlan, transcript: Transcript) -> bool:
    """Whether the results state every fact that the expert looked for."""
    found = " ".join(each.text for each in transcript.segments if each.kind == "result")
    return all(value in found for lookup in plan.lookups for value in lookup.evidence)
