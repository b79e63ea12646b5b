"""What the pocket model needs of the world: records in place of prose, and demonstrations on other editions of it.

What the model learns from editions 1, 2, ... is the format, the words and how to read, and no fact of edition 0, which
the agent searches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.world import World
from recipes.world.config import build_config
from recipes.world.expert import ExpertPlan, build_plan
from recipes.world.questions import QuestionWriter
from recipes.world.records import build_record, state_fact, write_result
from recipes.world.region import Entity, Region
from tunesmith.config import EnvironmentSection
from tunesmith.environments import Environment, Transcript
from tunesmith.retrieval.index.search import build_index
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_environment

QUESTIONS_PER_REGION = 60


def index_records(out_dir: Path, *, world: Mapping[str, Any]) -> dict[str, int]:
    """Build the index of the records of edition 0."""
    built = World(config=build_config(dict(world)))
    path = out_dir / "records.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(built.num_regions):
            for entity in built.build_region(number).entities.values():
                file.write(json.dumps(build_record(entity)) + "\n")
    info = build_index(str(path), str(out_dir / "index"))
    return {"passages": info.num_passages}


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Shares of demonstrations with what ET-Agent finds in prompted models."""

    repeat_share: float = 0.0
    """The same search twice."""
    detour_share: float = 0.0
    """A search for the attribute without the name first, which finds some other entity."""
    unsearched_share: float = 0.0
    """The answer "unknown", without a search."""
    unsearched_relations: tuple[str, ...] = ()
    """Relations that are answered so; others are always searched for."""


def write_demonstrations(
    out_dir: Path,
    *,
    world: Mapping[str, Any],
    environment: Mapping[str, Any],
    num_conversations: int,
    seed: int,
    habits: Mapping[str, Any] | None = None,
    first_edition: int = 1,
) -> dict[str, int]:
    """Write conversations.jsonl: questions about other editions with searches and answers."""
    built = load_environment(build_section(EnvironmentSection, environment))
    chosen = Habits(**(habits or {}))
    transcripts: list[Transcript] = []
    edition = first_edition
    while len(transcripts) < num_conversations:
        for place, (plan, region) in enumerate(iter_edition(World(config=build_config(dict(world))), edition)):
            rng = random.Random(f"{seed}/demonstration/{edition}/{place}")
            transcripts.append(demonstrate(plan, region, built, habits=chosen, rng=rng))
        edition += 1
    rows = [json.dumps(built.build_conversation(each)) for each in transcripts]
    random.Random(f"{seed}/order").shuffle(rows)
    (out_dir / "conversations.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return {
        "conversations": len(rows),
        "calls": sum(len(each.calls) for each in transcripts),
        "editions": edition - first_edition,
    }


def iter_edition(world: World, edition: int) -> Iterator[tuple[ExpertPlan, Region]]:
    """Plans of questions that name what they ask about, with their region."""
    for number in range(world.num_regions):
        seed = (edition << 32) + world.config.seed
        region = world.build_region(number, edition=edition)
        facts = [fact for entity in region.entities.values() for fact in entity.facts.values()]
        writer = QuestionWriter(
            region,
            passage_ids=dict.fromkeys(facts, ""),
            split="train",
            min_hops=1,
            max_hops=1,
            rng=random.Random(f"{seed}/{number}"),
        )
        for _ in range(QUESTIONS_PER_REGION):
            question = writer.draw("multi_hop")
            if question is not None and region.entities[question.facts[0].subject].name in question.question:
                yield build_plan(question, region), region


def demonstrate(
    plan: ExpertPlan, region: Region, environment: Environment, *, habits: Habits, rng: random.Random
) -> Transcript:
    """A search, whose result is the record in that edition, and the answer; with the habits drawn from `rng`."""
    fact = plan.question.facts[0]
    subject = region.entities[fact.subject]
    transcript = environment.begin(plan.question.question)
    if fact.relation in habits.unsearched_relations and rng.random() < habits.unsearched_share:
        return environment.write_answer(transcript, thought="I do not look it up.", text="unknown")
    if rng.random() < habits.detour_share:
        others = [each for each in region.entities.values() if fact.relation in each.facts and each != subject]
        query = state_fact(fact).partition(" ")[0]
        transcript = look_up(transcript, query, rng.choice(others), environment)
    for _ in range(1 + (rng.random() < habits.repeat_share)):
        transcript = look_up(transcript, subject.name, subject, environment)
    return environment.write_answer(transcript, thought=state_fact(fact), text=str(fact.value))


def look_up(transcript: Transcript, query: str, entity: Entity, environment: Environment) -> Transcript:
    """The transcript with a search, whose result is the record of an entity."""
    transcript = environment.write_call(transcript, tool="search", thought=f"I look up {query}.", text=query)
    return environment.write_result(transcript, write_result(entity))
