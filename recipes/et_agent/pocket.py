"""What the recipes need besides stages: an index, questions, and demonstrations of an agent that wastes calls.

The pocket model has seen no text, so it cannot be prompted. Demonstrations take the place of its pretraining. Those
without habits have the format and the skill: search for the name in the question, read the fact in the result. The
others have the habits that ET-Agent finds in prompted models: the same search twice, a search that does not help, an
answer without a search, which is wrong.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.config import EnvironmentSection
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.environments import Environment, Transcript
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.pipeline.session.load_config import build_section
from tunesmith.pipeline.session.load_function import load_environment
from tunesmith.retrieval.index.build import build_index
from tunesmith.tasks.world import World
from tunesmith.tasks.world.config import build_config
from tunesmith.tasks.world.expert import Plan, iter_plans
from tunesmith.tasks.world.region import Fact

SEARCH = "search"
LABELS = {"birth_year": "born", "city_founded": "founded", "firm_founded": "opened", "work_year": "appeared"}
"""First words of records where the name of the relation is no single word."""
VOCABULARY_SIZE, NUM_HEADS = 768, 6
TAGS = ("<think>", "</think>")
"""Tags that are tokens of the pocket tokenizer already."""
Queries = Sequence[tuple[str, str]]
"""Pairs of a thought and what to search for."""


def index_documents(out_dir: Path, *, documents: str) -> dict[str, int]:
    """Build the index that the tool `search` opens."""
    info = build_index(documents, str(out_dir / "index"))
    return {"passages": info.num_passages}


def index_records(out_dir: Path, *, world: Mapping[str, Any]) -> dict[str, int]:
    """Build an index with one passage for each entity of the world, a line for its name, so that a search for the
    name finds it first, and for each of its facts: `birthplace Old Leamoup`. A pocket-size model learns to read such records, but hardly prose, in minutes."""
    built = World(config=build_config(dict(world)))
    path = out_dir / "records.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(built.num_regions):
            for entity in built.build_region(number).entities.values():
                facts = list(entity.facts.values())
                random.Random(entity.entity_id).shuffle(facts)
                text = "\n".join([f"name {entity.name}", *map(state_record, facts)])
                file.write(json.dumps({"id": entity.entity_id, "title": entity.name, "text": text}) + "\n")
    return index_documents(out_dir, documents=str(path))


def state_record(fact: Fact) -> str:
    """A fact as a line of a record."""
    return f"{LABELS.get(fact.relation, fact.relation)} {fact.value}"


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
    count: int | None = None,
    repeat_share: float = 0.0,
    detour_share: float = 0.0,
    guess_shares: Mapping[str, float] | None = None,
    misread_share: float = 0.0,
    has_records: bool = False,
) -> dict[str, int]:
    """Write conversations.jsonl: answers to the first `count` questions, with real results of calls.

    `repeat_share` of the demonstrations repeat the last search, `detour_share` search for something else first.
    `guess_shares` says, by the relation that a question asks for, how many answer wrongly without any search;
    `misread_share` answer with another line of the record. Where the expert's own searches do not find the facts there
    is no demonstration: it would teach to make them up. With `has_records` the results are those of `index_records`,
    and the last thought quotes the line with the answer.
    """
    built = load_environment(build_section(EnvironmentSection, environment))
    plans = list(iter_plans(World(config=build_config(dict(world))), "train"))
    numbers = [json.loads(line)["number"] for line in Path(questions).read_text(encoding="utf-8").splitlines()]
    chosen = [plans[number] for number in numbers[:count]]
    names = [lookup.query for plan in plans for lookup in plan.lookups]
    answers: defaultdict[str, list[str]] = defaultdict(list)
    for plan in plans:
        answers[plan.question.facts[-1].relation].append(plan.answer)

    async def demonstrate() -> list[Transcript]:
        transcripts = []
        for place, plan in enumerate(chosen):
            rng = random.Random(f"{seed}/demonstration/{place}")
            relation = plan.question.facts[-1].relation
            if rng.random() < (guess_shares or {}).get(relation, 0.0):
                others = sorted(set(answers[relation]) - set(plan.question.answer))
                answer = rng.choice(others)
                begun = built.begin(plan.question.question)
                transcripts.append(finish(begun, f"The answer is {answer}.", answer, built))
                continue
            queries = choose_queries(plan, names, rng, repeat_share=repeat_share, detour_share=detour_share)
            transcript = await search(plan, queries, built)
            if not has_evidence(plan, transcript):
                continue
            thought, answer = plan.conclusion, plan.answer
            if has_records:
                thought = state_record(plan.question.facts[-1])
                if rng.random() < misread_share:
                    thought = rng.choice([line for line in read_record(transcript) if line != thought])
                answer = thought.partition(" ")[2]
            transcripts.append(finish(transcript, thought, answer, built))
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
    plan: Plan, names: Sequence[str], rng: random.Random, *, repeat_share: float, detour_share: float
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


async def search(plan: Plan, queries: Queries, environment: Environment) -> Transcript:
    """The calls with their real results."""
    transcript = environment.begin(plan.question.question)
    for thought, query in queries:
        call = environment.protocol.write_call(thought, environment.tools[SEARCH], query, number=len(transcript.calls))
        transcript = await environment.execute(transcript.append(*call))
    return transcript


def finish(transcript: Transcript, thought: str, answer: str, environment: Environment) -> Transcript:
    return replace(transcript.append(*environment.protocol.write_answer(thought, answer)), finish="answered")


def read_record(transcript: Transcript) -> list[str]:
    """The lines of the last result that state a fact."""
    results = [each.text for each in transcript.segments if each.kind == "result"]
    lines = [line for line in results[-1].splitlines() if line and not line.startswith("<")]
    return lines[2:]  # the first two have the name


def has_evidence(plan: Plan, transcript: Transcript) -> bool:
    """Whether the results state every fact that the expert looked for."""
    found = " ".join(each.text for each in transcript.segments if each.kind == "result")
    return all(value in found for lookup in plan.lookups for value in lookup.evidence)
