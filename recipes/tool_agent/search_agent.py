"""What the pocket pipeline of a search agent needs besides stages: records, questions and demonstrations.

The model has seen no text, so demonstrations about other *editions* of the world take the place of its pretraining: the
same invented words, but other names, facts and references. Edition 0 is what the agent searches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.world import World
from recipes.world.config import QuestionKind, build_config
from recipes.world.expert import ExpertPlan, build_plan
from recipes.world.questions import QuestionWriter
from recipes.world.records import build_record, state_fact, write_result
from recipes.world.region import Region
from recipes.world.schema import RELATIONS
from recipes.world.world import build_row
from tunesmith.config import EnvironmentSection
from tunesmith.environments import Environment, Transcript
from tunesmith.retrieval.index.search import build_index
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_environment

MAX_HOPS: Mapping[QuestionKind, int] = {"multi_hop": 2, "comparison": 1}
QUESTIONS_PER_REGION = 60


def prepare_world(out_dir: Path, *, world: Mapping[str, Any]) -> dict[str, int]:
    """Index the records of edition 0, and write its questions, train.jsonl and test.jsonl, about different entities."""
    built = World(config=build_config(dict(world)))
    rows: dict[str, list[dict[str, Any]]] = {"records": [], "train": [], "test": []}
    sizes = {"train": built.config.num_train, "test": built.config.num_test}
    for number in range(built.num_regions):
        region = built.build_region(number)
        split = "test" if number in built.test_regions else "train"
        for entity in region.originals:
            rows["records"].append(build_record(entity))
        for plan in iter_plans(region, seed=f"{built.config.seed}/{number}", num_questions=sizes[split]):
            row = build_row(plan.question, number=len(rows[split]))
            rows[split].append(row | {"id": f"{split}-{len(rows[split])}", "split": split})
    for split, size in sizes.items():
        random.Random(f"{built.config.seed}/{split}").shuffle(rows[split])
        rows[split] = rows[split][:size]
    for name, each in rows.items():
        (out_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each), encoding="utf-8")
    build_index(str(out_dir / "records.jsonl"), str(out_dir / "index"))
    return {name: len(each) for name, each in rows.items()}


def iter_plans(region: Region, *, seed: str, num_questions: int) -> Iterator[ExpertPlan]:
    """Plans whose lookups are all for the name of an entity: the first names are in the question, later ones are found
    on the way."""
    facts = [fact for entity in region.originals for fact in entity.facts.values()]
    names = {entity.name for entity in region.originals}
    writers = {
        kind: QuestionWriter(
            region,
            passage_ids=dict.fromkeys(facts, ""),
            split="train",
            min_hops=1,
            max_hops=max_hops,
            rng=random.Random(f"{seed}/{kind}"),
        )
        for kind, max_hops in MAX_HOPS.items()
    }
    for number in range(num_questions):
        kind: QuestionKind = "multi_hop" if number % 3 else "comparison"
        question = writers[kind].draw(kind)
        plan = None if question is None else build_plan(question, region)
        if plan is not None and all(lookup.query in names for lookup in plan.lookups):
            yield plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Shares of demonstrations with what prompted models do."""

    repeat_share: float = 0.0
    """The last search again."""
    detour_share: float = 0.0
    """A search for something else first."""
    guess_share: float = 0.0
    """An answer without a search, where values are years or words, or two answers are possible."""


def write_demonstrations(
    out_dir: Path,
    *,
    world: Mapping[str, Any],
    environment: Mapping[str, Any],
    num_conversations: int,
    seed: int,
    first_edition: int = 1,
    **shares: float,
) -> dict[str, int]:
    """Write conversations.jsonl: questions about editions from `first_edition` on with searches and answers; `shares`
    are `Habits`."""
    built = load_environment(build_section(EnvironmentSection, environment))
    original = World(config=build_config(dict(world)))
    habits = Habits(**shares)
    transcripts: list[Transcript] = []
    edition = first_edition
    while len(transcripts) < num_conversations:
        edition_seed = (edition << 32) + original.config.seed
        for number in range(original.num_regions):
            region = original.build_region(number, edition=edition)
            plans = iter_plans(region, seed=f"{edition_seed}/{number}", num_questions=QUESTIONS_PER_REGION)
            rng = random.Random(f"{seed}/demonstration/{edition}/{number}")
            transcripts += [demonstrate(plan, region, built, habits=habits, rng=rng) for plan in plans]
        edition += 1
    random.Random(f"{seed}/order").shuffle(transcripts)
    rows = [json.dumps(built.build_conversation(each)) for each in transcripts[:num_conversations]]
    (out_dir / "conversations.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    calls = sum(len(each.calls) for each in transcripts[:num_conversations])
    return {"conversations": len(rows), "calls": calls, "editions": edition - first_edition}


def demonstrate(
    plan: ExpertPlan, region: Region, environment: Environment, *, habits: Habits, rng: random.Random
) -> Transcript:
    """Searches, whose results are records of that edition, and the answer; with the habits drawn from `rng`."""
    transcript = environment.begin(plan.question.question)
    entities = {entity.name: entity for entity in region.originals}
    guesses = find_guesses(plan, region)
    if guesses and rng.random() < habits.guess_share:
        return environment.write_answer(transcript, thought="I know it.", text=rng.choice(guesses))
    names = [lookup.query for lookup in plan.lookups]
    if rng.random() < habits.detour_share:
        names.insert(0, rng.choice(list(entities)))
    if rng.random() < habits.repeat_share:
        names.append(names[-1])
    learned: list[str] = []
    for name in names:
        thought = ", ".join([*learned, f"I look up {name}."])
        transcript = environment.write_call(transcript, tool="search", thought=thought, text=name)
        transcript = environment.write_result(transcript, write_result(entities[name]))
        stated = [
            state_fact(fact) for fact in plan.question.facts if entities.get(name) == region.entities[fact.subject]
        ]
        learned += [each for each in stated if each not in learned]
    return environment.write_answer(transcript, thought=", ".join(learned), text=plan.answer)


def find_guesses(plan: ExpertPlan, region: Region) -> list[str]:
    """Values that a guess can be, none if the answer is a name that has to be found."""
    if plan.question.kind == "comparison":
        return ["yes", "no"] if plan.answer in ("yes", "no") else [lookup.query for lookup in plan.lookups]
    asked = plan.question.facts[-1]
    if RELATIONS[asked.relation].value not in ("year", "word"):
        return []
    return [str(each.facts[asked.relation].value) for each in region.originals if asked.relation in each.facts]
