"""Constrained replies, penalties and top logprobs through the endpoint, on the engine with a random pocket model."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import openai
import pytest
from served import USER, create_completion

from tunesmith.chat.renderer import Renderer
from tunesmith.config import AlgorithmSection, EngineSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.experience.samples import build_samples
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.rollout.service import ModelService
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Distribution, Group, Sampling, Task, Trajectory

pytest.importorskip("llguidance")
TOKENIZER = build_pocket_tokenizer()
MODEL = build_pocket_model(TOKENIZER, hidden_size=96, num_layers=2)
use_plan_attention(MODEL)
DEFAULTS = Sampling(distribution=Distribution(temperature=1.0), max_tokens=120)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
TOOLS = [
    {"type": "function", "function": {"name": "register", "description": "d", "parameters": PERSON}},
    {"type": "function", "function": {"name": "wait", "parameters": {
        "type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"], "additionalProperties": False,
    }}},
]  # fmt: skip


def build_service(**options: Any) -> ModelService:
    engine = LocalEngine(MODEL, TOKENIZER, EngineSection(kv_cache_tokens=8000), max_model_len=600)
    return ModelService(engine, Renderer(TOKENIZER, **options), model_name="m", sampling=DEFAULTS)


def ask(service: ModelService | None = None, **fields: Any) -> Any:
    return run_lockstep(create_completion(service or build_service(), **fields))


def is_person(value: Any) -> bool:
    return value.keys() == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 99


def test_replies_are_valid_under_a_json_schema() -> None:
    completion, turns = ask(response_format=PERSON_FORMAT, n=6)
    assert [choice.finish_reason for choice in completion.choices] == ["stop"] * 6
    assert all(is_person(json.loads(choice.message.content)) for choice in completion.choices)
    assert len({choice.message.content for choice in completion.choices}) > 1
    assert all(turn.sampled_ids[-1] == TOKENIZER.eos_token_id for turn in turns)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-c]+"}, "[0-9]{3}-[a-c]+"),
        ({"guided_choice": ["yes", 'no "way"']}, 'yes|no "way"'),
        ({"guided_json": json.dumps({"type": "integer"})}, "-?[0-9]+"),
        ({"guided_grammar": 'root ::= "a" "b"+'}, "ab+"),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, "x|y"),
        ({"structured_outputs": {"regex": "é+", "choice": None}}, "é+"),
    ],
)
def test_each_kind_of_constraint_holds_for_chat_and_text_completions(fields: dict, pattern: str) -> None:
    completion, _ = ask(extra_body=fields, max_tokens=40)
    choice = completion.choices[0]
    assert re.fullmatch(pattern, choice.message.content) or choice.finish_reason == "length"

    async def complete() -> Any:
        service = build_service()
        client = service.open(seed=3).model.client
        return await client.completions.create(model="m", prompt="2 + 3 =", extra_body=fields, max_tokens=40)

    choice = run_lockstep(complete()).choices[0]
    assert re.fullmatch(pattern, choice.text) or choice.finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "register"}}])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_forced_tool_calls_have_valid_names_and_arguments(choice: Any, is_parallel: bool) -> None:
    completion, turns = ask(tools=TOOLS, tool_choice=choice, n=5, max_tokens=200, parallel_tool_calls=is_parallel)
    finished = [each for each in completion.choices if each.finish_reason == "tool_calls"]
    assert len(finished) >= 3
    calls = [call.function for each in finished for call in each.message.tool_calls]
    for call in calls:
        arguments = json.loads(call.arguments)
        assert is_person(arguments) if call.name == "register" else arguments["days"] in (1, 2)
    assert all(not each.message.content for each in finished)
    if isinstance(choice, dict):
        assert {call.name for call in calls} == {"register"}
        assert all(len(each.message.tool_calls) == 1 for each in finished)
    assert all(min(turn.logprobs) < -0.5 for turn in turns)


def test_responses_honour_text_format() -> None:
    async def respond() -> Any:
        client = build_service().open(seed=3).model.client
        form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
        return await client.responses.create(model="m", input="hi", text={"format": form}, max_output_tokens=120)

    response = run_lockstep(respond())
    assert response.status == "completed"
    assert is_person(json.loads(response.output_text))


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_messages_honour_output_formats(field: str) -> None:
    pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed: pip install anthropic")
    form: dict[str, Any] = {"type": "json_schema", "schema": PERSON}
    fields = {field: form if field == "output_format" else {"format": form}}

    async def ask_messages() -> Any:
        client = build_service().open(seed=3).model.as_anthropic_client()
        return await client.messages.create(model="m", messages=USER, max_tokens=120, extra_body=fields)

    message = run_lockstep(ask_messages())
    assert message.stop_reason == "end_turn"
    assert is_person(json.loads(message.content[0].text))


def test_a_reply_in_a_response_format_may_call_tools_instead() -> None:
    completion, _ = ask(tools=TOOLS, response_format=PERSON_FORMAT, n=12, max_tokens=200, temperature=1.5)
    finished = [each for each in completion.choices if each.finish_reason != "length"]
    kinds = {bool(each.message.tool_calls) for each in finished}
    assert kinds == {True, False}
    for each in finished:
        assert each.message.tool_calls or is_person(json.loads(each.message.content))


def test_a_constraint_starts_after_reasoning_that_the_prompt_opens() -> None:
    service = build_service()
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = str(TOKENIZER.chat_template) + "{% if add_generation_prompt %}<think>\n{% endif %}"
    service.recorder.renderer = Renderer(tokenizer)
    fields = {"guided_choice": ["yes", "no"], "logit_bias": {str(TOKENIZER.convert_tokens_to_ids("</think>")): 5.0}}
    completion, _ = ask(service, extra_body=fields, n=4)
    for choice in completion.choices:
        if choice.finish_reason == "stop":
            assert choice.message.content in ("yes", "no")
    assert any(choice.message.reasoning_content for choice in completion.choices)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"extra_body": {"guided_regex": "[0-9"}}, None, "regex"),
        ({"extra_body": {"guided_json": {"type": "strange"}}}, None, "Invalid type: strange"),
        ({"extra_body": {"guided_grammar": 'root ::= "a'}}, "guided_grammar", "GBNF"),
        ({"extra_body": {"guided_regex": "a", "ignore_eos": True}}, None, "cannot be combined with a grammar"),
        ({"extra_body": {"min_tokens": 3}, "stop": ["x"]}, None, "min_tokens cannot delay stop strings"),
        ({"extra_body": {"min_tokens": 300}}, None, "min_tokens=300"),
    ],
)
def test_invalid_constraints_are_refused(fields: dict, param: str | None, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(**fields)
    assert caught.value.body["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_top_logprobs_and_entropies_are_in_the_response(stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "extra_body": {"return_entropy": True, "return_token_ids": True}}
    response, (turn,) = ask(stream=stream, max_tokens=9, **fields)
    choices = [chunk.choices[0] for chunk in response] if stream else [response.choices[0]]
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    entropies = [each for choice in choices for each in choice.entropies]
    assert [token.logprob for token in content] == list(turn.logprobs)
    assert turn.entropies == tuple(entropies) and len(entropies) == len(content)
    for token in content:
        values = [each.logprob for each in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert token.logprob <= values[0] + 1e-9


def test_text_completions_have_top_logprobs_by_text() -> None:
    async def complete() -> Any:
        service = build_service()
        client = service.open(seed=3).model.client
        return await client.completions.create(model="m", prompt="2 + 3 =", logprobs=2, max_tokens=5)

    logprobs = run_lockstep(complete()).choices[0].logprobs
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob and len(top) in (2, 3)


def test_bad_words_penalties_and_min_tokens_are_honoured() -> None:
    fields = {"bad_words": ["apples"], "repetition_penalty": 1.2, "min_tokens": 4}
    eos = {str(TOKENIZER.eos_token_id): 30.0}
    service = build_service()
    completion, (turn,) = ask(service, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias=eos, extra_body=fields)
    assert len(turn.sampled_ids) == 5 and completion.choices[0].finish_reason == "stop"
    distribution = turn.distribution
    assert (distribution.presence_penalty, distribution.frequency_penalty) == (0.5, -0.5)
    assert (distribution.repetition_penalty, distribution.min_tokens) == (1.2, 4)
    assert distribution.end_ids == (TOKENIZER.eos_token_id,)
    words = {tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("apples", " apples")}
    assert set(distribution.bad_words) == words


def test_an_agent_with_a_json_schema_trains_without_mismatch() -> None:
    service = build_service()

    async def run(index: int) -> Trajectory:
        bound = service.open(seed=index)
        client, messages = bound.model.client, list(USER)
        for fields in ({"response_format": PERSON_FORMAT}, {"tools": TOOLS, "tool_choice": "required"}):
            options = {"frequency_penalty": 0.4, **fields}
            reply = await client.chat.completions.create(model="m", messages=messages, **options)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        return Trajectory(task=TASK, run_index=index, turns=bound.close(), reward=float(index % 2))

    async def run_all() -> list[Trajectory]:
        return [await run(index) for index in range(4)]

    group = Group(task=TASK, trajectories=tuple(run_lockstep(run_all())))
    samples, _ = build_samples([group], [[-1.0, 1.0, -1.0, 1.0]])
    engine = service.recorder.engine
    assert isinstance(engine, LocalEngine)
    trainer = Trainer(
        copy.deepcopy(MODEL), TrainerSection(), AlgorithmSection(algorithm_type="grpo"),
        max_model_len=600, num_total_steps=1, grammars=engine.grammars,
    )  # fmt: skip
    metrics = trainer.step(samples)
    assert metrics["mismatch/kl"] < 1e-7
    assert metrics["mismatch/max_log_ratio"] < 1e-3


TASK = Task(task_id="t/0", index=0, row={})
