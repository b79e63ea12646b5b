"""What the pocket pipelines of tool agents need besides stages: an untrained model, an index, and demonstrations.

The pocket model has seen no text, so demonstrations take the place of its pretraining. Each is about other names, and
there are many, so that it learns to copy names that it never saw. Beside the format they can show habits that prompted
models have: the same search twice, a search that does not help, an answer without a search.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
from tunesmith.tasks.world.schema import RELATIONS

TAGS = ("<think>", "</think>")
"""Tags that are tokens of the pocket tokenizer already."""
SEARCH, PYTHON = "search", "python"
VOCABULARY_SIZE = 1024
NUM_HEADS = 6
NUM_TOKENIZER_LINES = 3000


def index_documents(out_dir: Path, *, documents: str) -> dict[str, int]:
    """Build the index that the tool `search` opens."""
    info = build_index(documents, str(out_dir / "index"))
    return {"passages": info.num_passages}


def make_model(out_dir: Path, *, conversations: str, seed: int) -> dict[str, int]:
    """Write an untrained model to `out_dir/model`; its tokenizer is trained on the last conversations."""
    lines = Path(conversations).read_text(encoding="utf-8").splitlines()[-NUM_TOKENIZER_LINES:]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How often a demonstration repeats its last search, searches for something else first, or guesses."""

    repeat_share: float = 0.0
    detour_share: float = 0.0
    guess_share: float = 0.0


def write_demonstrations(
    out_dir: Path,
    *,
    world: Mapping[str, Any],
    environment: Mapping[str, Any],
    num_conversations: int,
    num_first_calls: int,
    seed: int,
    **shares: float,
) -> dict[str, int]:
    """Write conversations.jsonl, and first_calls.jsonl with conversations that end with the first call.

    They are about different training questions of the world. All calls are really executed. Short thoughts leave little
    to learn but names and facts: what an earlier result says, with "it" for its subject. `shares` are `Habits`.
    """
    built = load_environment(build_section(EnvironmentSection, environment))
    plans = islice(iter_plans(World(config=build_config(dict(world))), "train"), num_first_calls + num_conversations)
    demonstrator = Demonstrator(environment=built, habits=Habits(**shares), seed=seed)
    transcripts = run_outside_of_loops(lambda: asyncio.run(demonstrator.follow_all(list(plans), num_first_calls)))
    parts = {"first_calls": transcripts[:num_first_calls], "conversations": transcripts[num_first_calls:]}
    for name, part in parts.items():
        rows = [json.dumps(built.build_conversation(each)) for each in part]
        (out_dir / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    calls = sum(len(each.calls) for each in parts["conversations"])
    return {name.replace("_", " "): len(part) for name, part in parts.items()} | {"calls": calls}


@dataclass(frozen=True, kw_only=True)
class Demonstrator:
    """Answers questions by the expert's plans, with habits."""

    environment: Environment
    habits: Habits
    seed: int

    async def follow_all(self, plans: Sequence[Plan], num_first_calls: int) -> list[Transcript]:
        """The first `num_first_calls` transcripts end with their first call, whose result is left out."""
        names = [lookup.query for plan in plans for lookup in plan.lookups]
        return [
            self.write_first_call(plan)
            if number < num_first_calls
            else await self.follow(plan, names, random.Random(f"{self.seed}/demonstration/{number}"))
            for number, plan in enumerate(plans)
        ]

    def write_first_call(self, plan: Plan) -> Transcript:
        transcript = self.environment.begin(plan.question.question)
        return self._write_call(transcript, "I look it up.", SEARCH, plan.lookups[0].query)

    async def follow(self, plan: Plan, names: Sequence[str], rng: random.Random) -> Transcript:
        """The transcript with real results."""
        transcript = self.environment.begin(plan.question.question)
        is_guess = rng.random() < self.habits.guess_share
        if not is_guess:
            queries = [lookup.query for lookup in plan.lookups]
            if rng.random() < self.habits.detour_share:
                queries.insert(rng.randrange(len(queries) + 1), rng.choice(names))
            if rng.random() < self.habits.repeat_share:
                queries.append(queries[-1])
            transcript = await self._search(transcript, plan, queries)
        learned = self._learn(transcript, plan)
        if plan.computation is not None and PYTHON in self.environment.tools and not is_guess:
            call = self._write_call(transcript, learned, PYTHON, f"print({plan.computation})")
            transcript = await self.environment.execute(call)
            learned = "That is it."
        answer = rng.choice(find_guesses(plan) or names) if is_guess else plan.answer
        written = self.environment.protocol.write_answer(learned or "I know it.", answer)
        return replace(transcript.append(*written), finish="answered")

    async def _search(self, transcript: Transcript, plan: Plan, queries: Sequence[str]) -> Transcript:
        for query in queries:
            thought = self._learn(transcript, plan) or "I look it up."
            transcript = await self.environment.execute(self._write_call(transcript, thought, SEARCH, query))
        return transcript

    def _learn(self, transcript: Transcript, plan: Plan) -> str:
        """What the last result says of the facts of the question."""
        results = [each.result for each in transcript.segments if each.kind == "result"]
        sentences = [
            RELATIONS[fact.relation].statements[0].format(s="it", v=fact.value)
            for fact in plan.question.facts
            if results and str(fact.value) in results[-1]
        ]
        return " ".join(f"{each[0].upper()}{each[1:]}" for each in dict.fromkeys(sentences))

    def _write_call(self, transcript: Transcript, thought: str, tool: str, text: str) -> Transcript:
        number = len(transcript.calls)
        return transcript.append(
            *self.environment.protocol.write_call(thought, self.environment.tools[tool], text, number=number)
        )


def find_guesses(plan: Plan) -> list[str]:
    """The possible answers of a comparison."""
    if plan.answer in ("yes", "no"):
        return ["yes", "no"]
    return [lookup.query for lookup in plan.lookups] if plan.question.kind == "comparison" else []
