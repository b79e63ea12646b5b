"""What the pocket model needs of the world: records in place of prose, and demonstrations on other editions of it.

A record has a line for each fact of an entity: `birthplace Old Leamoup`. A pocket-size model learns to read records in
minutes, but hardly prose. An edition is the same world with the same invented words, but other names, facts and
references: what the model learns from editions 1, 2, ... is the format, the words and how to read, and no fact of
edition 0, which the agent searches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.config import EnvironmentSection
from tunesmith.environments import Environment, Transcript
from tunesmith.environments.transcript import Segment
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.pipeline.session.load_config import build_section
from tunesmith.pipeline.session.load_function import load_environment
from tunesmith.retrieval.index.build import build_index
from tunesmith.tasks.world import World
from tunesmith.tasks.world.config import build_config
from tunesmith.tasks.world.expert import Plan, build_plan
from tunesmith.tasks.world.questions import QuestionWriter
from tunesmith.tasks.world.region import Entity, Fact, Region, build_region

LABELS = {"birth_year": "born", "city_founded": "founded", "firm_founded": "opened", "work_year": "appeared"}
"""First words of lines where the name of the relation is not one word."""
VOCABULARY_SIZE, NUM_HEADS = 1024, 6
TAGS = ("<think>", "</think>")
"""Tags that are tokens of the pocket tokenizer already."""
QUESTIONS_PER_REGION = 60


def index_records(out_dir: Path, *, world: Mapping[str, Any]) -> dict[str, int]:
    """Build the index of the records of edition 0. A record begins with its name, so that it is the first result of a
    search for the name."""
    built = World(config=build_config(dict(world)))
    path = out_dir / "records.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(built.num_regions):
            for entity in built.build_region(number).entities.values():
                row = {"id": entity.entity_id, "title": entity.name, "text": write_record(entity)}
                file.write(json.dumps(row) + "\n")
    info = build_index(str(path), str(out_dir / "index"))
    return {"passages": info.num_passages}


def write_record(entity: Entity) -> str:
    facts = list(entity.facts.values())
    random.Random(f"{entity.entity_id} {entity.name}").shuffle(facts)
    return "\n".join([f"name {entity.name}", *map(state_fact, facts)])


def state_fact(fact: Fact) -> str:
    """A fact as a line of a record."""
    return f"{LABELS.get(fact.relation, fact.relation)} {fact.value}"


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


def iter_edition(world: World, edition: int) -> Iterator[tuple[Plan, Region]]:
    """Plans of questions that name what they ask about, with their region."""
    for number in range(world.num_regions):
        seed = (edition << 32) + world.config.seed
        region = build_region(number, seed=seed, names=world.names, num_distractors=0)
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
    plan: Plan, region: Region, environment: Environment, *, habits: Habits, rng: random.Random
) -> Transcript:
    """A search, whose result is the record in that edition, and the answer; with the habits drawn from `rng`."""
    fact = plan.question.facts[0]
    subject = region.entities[fact.subject]
    transcript = environment.begin(plan.question.question)
    if fact.relation in habits.unsearched_relations and rng.random() < habits.unsearched_share:
        return answer(transcript, "I do not look it up.", "unknown", environment)
    if rng.random() < habits.detour_share:
        others = [each for each in region.entities.values() if fact.relation in each.facts and each != subject]
        query = state_fact(fact).partition(" ")[0]
        transcript = look_up(transcript, query, rng.choice(others), environment)
    for _ in range(1 + (rng.random() < habits.repeat_share)):
        transcript = look_up(transcript, subject.name, subject, environment)
    return answer(transcript, state_fact(fact), str(fact.value), environment)


def look_up(transcript: Transcript, query: str, entity: Entity, environment: Environment) -> Transcript:
    """The transcript with a search, whose result is the record of an entity."""
    tool = environment.tools["search"]
    number = len(transcript.calls)
    call = environment.protocol.write_call(f"I look up {query}.", tool, query, number=number)
    transcript = transcript.append(*call)
    record = f"{entity.name}\n{write_record(entity)}"
    result = Segment(kind="result", text="", tool=tool.name, result=record, call_id=transcript.open_calls[0].call_id)
    return transcript.append(environment.protocol.wrap(result))


def answer(transcript: Transcript, thought: str, text: str, environment: Environment) -> Transcript:
    return replace(transcript.append(*environment.protocol.write_answer(thought, text)), finish="answered")


def make_model(out_dir: Path, *, conversations: str, seed: int) -> dict[str, int]:
    """Write an untrained model to `out_dir/model`; its tokenizer is trained on the conversations."""
    lines = Path(conversations).read_text(encoding="utf-8").splitlines()
    text = "\n".join(read_text(message["content"]) for line in lines for message in json.loads(line)["messages"])
    for tag in TAGS:
        text = text.replace(tag, "")
    tokenizer = build_pocket_tokenizer(text, has_names=True, vocabulary_size=VOCABULARY_SIZE)
    model = build_pocket_model(tokenizer, seed=seed, num_kv_heads=NUM_HEADS)
    (out_dir / "model").mkdir()
    save_model_files(out_dir / "model", model, tokenizer)
    return {"parameters": model.num_parameters(), "tokens of the vocabulary": len(tokenizer)}


def read_text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
