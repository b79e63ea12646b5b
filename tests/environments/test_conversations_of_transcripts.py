"""Rows for fine-tuning from transcripts: their samples train what rollouts sample, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from agents import TOKENIZER, ScriptedModel, build_search

from recipes.world.config import WorldConfig
from recipes.world.conversations import write_conversations
from recipes.world.expert import iter_plans
from recipes.world.world import World, generate
from search_corpora import needs_bm25
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.config import EnvironmentSection
from tunesmith.environments import Environment
from tunesmith.environments.transcript import find_format_error
from tunesmith.errors import ConfigError, DataError
from tunesmith.experience.samples import build_samples
from tunesmith.judges.composite import numeric_judge, squad_judge
from tunesmith.judges.transcript import read_transcript
from tunesmith.types import Group, Task, Trajectory

pytestmark = pytest.mark.anyio

SEARCH = "<think>I look.</think>\n<search>Paris</search>"
ANSWER = "<think>I know.</think>\n<answer>\\boxed{Paris}</answer>"
WORLD = {"num_documents": 300, "num_train": 60, "num_test": 10}


def read_sample(row):
    (sample,) = ConversationReader(TOKENIZER).read([row], max_model_len=100_000)
    return sample


async def run(*replies, config=None):
    agent = ScriptedModel(*replies)
    environment = Environment(config, tools=[build_search()])
    return environment, await environment.run("Where?", agent.model), agent.close()


async def test_fine_tuning_has_the_tokens_and_the_mask_of_the_rollout():
    environment, transcript, turns = await run(SEARCH, ANSWER)
    task = Task(task_id="t/0", index=0, row={})
    rollout = Trajectory(task=task, run_index=0, turns=turns, reward=1.0)
    (expected,) = build_samples([Group(task=task, trajectories=(rollout,))], [[1.0]])[0]
    sample = read_sample(json.loads(json.dumps(environment.build_conversation(transcript))))
    assert sample.token_ids == (*expected.token_ids, TOKENIZER.eos_token_id)
    assert sample.is_sampled == (*expected.is_sampled, True)


async def test_forced_text_is_trained_only_on_request():
    environment, transcript, _ = await run("I look.</think>\n<search>Paris</search>", ANSWER,
                                           config=EnvironmentSection(opening="<think>"))  # fmt: skip
    parts = environment.build_conversation(transcript)["messages"][-1]["content"]
    assert [part["weight"] for part in parts] == [0, 1, 0, 1]
    parts = environment.build_conversation(transcript, trains_forced=True)["messages"][-1]["content"]
    assert (parts[0]["weight"], parts[0]["text"]) == (1, SEARCH)


async def test_native_transcripts_are_conversations_with_tools():
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Paris"}}\n</tool_call>'
    environment, transcript, _ = await run(call, "\\boxed{Paris}", config=EnvironmentSection(protocol="native"))
    row = environment.build_conversation(transcript)
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert row["tools"] == [environment.tools["search"].schema]
    assert read_sample(row).is_sampled.count(True) > 0


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"content": [{"type": "text", "text": "a", "weight": 2}]}, r"content\[0\].weight must be 0 or 1"),
        ({"content": [{"type": "text", "text": "a", "weight": 1}], "weight": 0}, "can have no weight"),
        ({"content": [{"type": "text", "text": "a", "weight": 0}]}, "no assistant message to train on"),
        ({"content": [{"type": "text", "text": "", "weight": 1}]}, "empty assistant message"),
    ],
)
def test_malformed_parts_are_refused(message, sentence):
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **message}]}
    with pytest.raises(DataError, match=sentence):
        read_sample(row)


async def test_judges_read_answers_and_calls_of_transcripts():
    _, transcript, _ = await run(SEARCH, "<think>I know: 12.</think>\n<answer>\\boxed{7}</answer>")
    assert (await numeric_judge(task={"answer": "7"}, response=transcript)).reward == 1.0
    assert (await squad_judge(task={"answer": ["seven", "7"]}, response=transcript)).metrics == {"f1": 1.0, "em": 1.0}
    (call,) = read_transcript(transcript).calls
    assert (call.name, json.loads(call.arguments), call.result) == ("search", {"query": "Paris"}, "All about Paris.")
    _, unanswered, _ = await run(SEARCH, "I know: 7")
    assert (await numeric_judge(task={"answer": "7"}, response=unanswered)).reward == 0.0


# The expert of the world


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    place = tmp_path_factory.mktemp("world")
    generate(place, **WORLD)
    search = {"tool": "search", "settings": {"source": "index", "index": str(place / "documents.jsonl"), "top_n": 3}}
    section = {"tools": ["calculator", search]}
    counts = write_conversations(place / "out", world=WORLD, environment=section)
    rows = [json.loads(line) for line in (place / "out" / "conversations.jsonl").read_text().splitlines()]
    return place, counts, rows, section


@needs_bm25
def test_most_questions_have_a_conversation(expert):
    _, counts, rows, _ = expert
    assert counts["conversations"] == len(rows) > 50
    assert counts["conversations"] + counts["left out"] == WORLD["num_train"]


@needs_bm25
def test_conversations_end_with_an_accepted_answer_and_train_no_result(expert):
    place, _, rows, _ = expert
    answers = {
        row["question"]: row["answer"] for row in map(json.loads, (place / "train.jsonl").read_text().splitlines())
    }
    for row in rows:
        parts = row["messages"][-1]["content"]
        assert parts[-1]["text"].endswith(f"\\boxed{{{answers[row['messages'][1]['content']][0]}}}</answer>")
        assert all(("<result>" in part["text"]) == (part["weight"] == 0) for part in parts)


def test_an_expert_makes_no_more_lookups_than_there_are_passages_and_computes_exactly():
    plans = list(iter_plans(World(config=WorldConfig(**WORLD)), "train"))
    assert len(plans) == WORLD["num_train"]
    for plan in plans:
        assert 1 <= len(plan.lookups) <= len(plan.question.facts)
        if plan.computation is not None:
            assert str(eval(plan.computation)) == plan.answer
    assert {plan.computation is None for plan in plans} == {True, False}


@needs_bm25
async def test_the_format_of_the_expert_is_that_of_the_environment(expert):
    environment = Environment(tools=[build_search()])
    transcript = environment.write_call(environment.begin("q"), tool="search", thought="I look.", text="x")
    transcript = environment.write_answer(await environment.execute(transcript), thought="So.", text="y")
    assert find_format_error(transcript) is None
    assert (transcript.answer, transcript.finish) == ("y", "answered")


@needs_bm25
@pytest.mark.parametrize("protocol", ["tags", "native"])
async def test_a_given_result_is_written_like_that_of_the_tool(expert, protocol):
    environment = Environment(EnvironmentSection(protocol=protocol), tools=[build_search()])
    called = environment.write_call(environment.begin("q"), tool="search", thought="I look.", text="x")
    executed = await environment.execute(called)
    given = environment.write_result(called, executed.segments[-1].result)
    assert given.segments[-1] == replace(executed.segments[-1], ms=0.0)
    assert environment.build_conversation(given) == environment.build_conversation(executed)


def test_an_environment_without_search_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="none named search"):
        write_conversations(tmp_path, world=WORLD, environment={"tools": ["calculator"]})
