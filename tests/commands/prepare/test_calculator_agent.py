"""The calculator agent: tool calls, errors, limits; demonstrations have exactly the tokens of its rollouts."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from chat_templates import CHATML, QWEN3, QWEN25
from fakes import FakeEngine, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.commands.prepare.calculator_agent import (
    MAX_CALLS,
    SYSTEM_PROMPT,
    TOOLS,
    calculator_agent,
)
from tunesmith.commands.prepare.rows import build_messages, check_calculations
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.compat.chat_models import build_agentscope_model, has_agentscope
from tunesmith.experience.samples import build_samples
from tunesmith.judges.composite import gsm8k_judge
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.signature import check_workflow_function
from tunesmith.tasks.solutions import parse_solution
from tunesmith.types import Group, Sampling, Task, Trajectory

TASK = {"question": "Natalia sold 48 clips in April and half as many in May. How many in all?", "answer": "72"}
SOLUTION = (
    "In May she sold 48/2 = <<48/2=24>>24 clips.\nShe sold 48+24 = <<48+24=72>>72 clips, a lot of clips.\n#### 72"
)
QWEN3_SPLITTING = QWEN3.replace(
    "{%- if loop.index0 > ns.last_query and",
    """{%- if '</think>' in message.content and not message.reasoning_content %}
{%- set message = dict(message, content=message.content.split('</think>')[-1].lstrip('\\n'),
    reasoning_content=message.content.split('</think>')[0].split('<think>')[-1].strip('\\n')) %}
{%- endif %}
{%- if loop.index0 > ns.last_query and""",
)
"""Like the template of Qwen3: extracts reasoning from the content."""


def write_call(*expressions):
    calls = [{"name": "calculator", "arguments": {"expression": each}} for each in expressions]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def run(*replies, template=QWEN25, build_model=None, max_tokens=2000, script=None):
    """The agent's output, its turns, and the decoded prompts of the engine."""
    tokenizer = build_chat_tokenizer(template)
    engine = FakeEngine(tokenizer, script or say(tokenizer, *replies))
    options = {} if build_model is None else {"build_model": lambda endpoint: build_model(endpoint)}
    service = ModelService(
        engine, Renderer(tokenizer), model_name="m", sampling=Sampling(max_tokens=max_tokens), **options
    )
    bound = service.open(seed=1)
    output = asyncio.run(calculator_agent(task=dict(TASK), model=bound.model))
    return output, bound.close(), [tokenizer.decode(prompt) for prompt, _, _ in engine.requests]


MODELS = [ChatModel]
if has_agentscope():
    MODELS.append(build_agentscope_model)


@pytest.mark.parametrize("build_model", MODELS)
def test_the_agent_calls_the_calculator_and_answers(build_model):
    output, turns, prompts = run(
        f"<think>\nHalf of 48.\n</think>\n{write_call('48/2')}",
        f"<think>\nAnd all.\n</think>\n{write_call('48+24')}",
        "<think>\nDone.\n</think>\n\n#### 72",
        build_model=build_model,
    )
    assert len(turns) == 3
    assert SYSTEM_PROMPT in prompts[0] and '"calculator"' in prompts[0] and TASK["question"] in prompts[0]
    assert "<tool_response>\n24\n</tool_response>" in prompts[1]
    assert output.response.get_text_content() == "#### 72"
    assert output.response.reasoning == "Half of 48.\nAnd all.\nDone."
    assert [call.result for call in output.response.calls] == ["24", "72"]
    assert output.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}
    for before, after in itertools.pairwise(turns):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids


def test_parallel_calls_are_executed_up_to_the_limit():
    output, _, prompts = run(write_call("2*3", *["1+1"] * MAX_CALLS), "#### 2")
    results = [call.result for call in output.response.calls]
    assert results[:-1] == ["6", *["2"] * (MAX_CALLS - 1)]
    assert results[-1].startswith(f"The limit of {MAX_CALLS} tool calls is reached")
    assert output.metrics == {"tool_calls": MAX_CALLS + 1, "tool_errors": 1.0}
    assert all(result in prompts[1] for result in results)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (write_call("1/0"), "Error: division by zero"),
        (write_call("9**9**9"), "Error: the exponent is larger"),
        (write_call("import os"), "Error: 'import' is not arithmetic"),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', "Error: there is no tool 'search'"),
        ('<tool_call>{"name": "calculator", "arguments": {"x": 1}}</tool_call>', "the arguments are expression"),
    ],
)
def test_errors_of_the_model_are_returned_as_tool_results(reply, error):
    output, turns, prompts = run(reply, "#### 72")
    assert error in prompts[1]
    assert len(turns) == 2
    assert output.metrics["tool_errors"] == 1.0
    assert output.response.answer == "#### 72"


def test_the_number_of_calls_is_limited():
    """One reply after the limit is told of it; a further call ends the rollout."""
    output, turns, _ = run(write_call("1+1"))
    assert len(turns) == MAX_CALLS + 2
    assert output.response.answer == ""
    assert asyncio.run(gsm8k_judge({**TASK, "answer": "2"}, output.response)).metrics["accuracy"] == 0.0


def test_a_truncated_reply_ends_the_rollout():
    output, turns, _ = run("<tool_call>\n" + "1 + " * 200, max_tokens=20)
    assert len(turns) == 1
    assert output.response.answer == ""


def test_a_plain_answer_needs_no_call():
    output, turns, _ = run("She sold 72.")
    assert (len(turns), output.response.answer, output.metrics["tool_calls"]) == (1, "She sold 72.", 0.0)


def test_the_agent_has_the_signature_of_a_workflow():
    check_workflow_function(calculator_agent)


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3_SPLITTING])
@pytest.mark.parametrize("style", ["all", "last"])
def test_demonstrations_have_the_tokens_of_the_agents_rollouts(template, style):
    tokenizer = build_chat_tokenizer(template)
    messages = build_messages(TASK["question"], check_calculations(parse_solution(SOLUTION)), style=style)
    (sample,) = ConversationReader(tokenizer).read([{"messages": messages, "tools": list(TOOLS)}], max_model_len=10**6)
    trained = list_trained_spans(sample)
    remaining = list(trained)
    output, turns, _ = run(template=template, script=lambda *request: remaining.pop(0))
    assert remaining == []
    assert [turn.sampled_ids for turn in turns] == trained
    assert turns[-1].prompt_ids + turns[-1].sampled_ids == sample.token_ids
    assert asyncio.run(gsm8k_judge(TASK, output.response)).reward == pytest.approx(1.0)
    assert [call.result for call in output.response.calls] == ["24", "72"][-len(output.response.calls) :]
    (sampled,) = join_turns(turns)
    assert (sampled.token_ids, sampled.is_sampled) == (sample.token_ids, sample.is_sampled)


def test_only_assistant_tokens_are_trained():
    tokenizer = build_chat_tokenizer(CHATML)
    messages = build_messages(TASK["question"], check_calculations(parse_solution(SOLUTION)), style="all")
    (sample,) = ConversationReader(tokenizer).read([{"messages": messages, "tools": list(TOOLS)}], max_model_len=10**6)
    assert [tokenizer.decode(ids) for ids in list_trained_spans(sample)] == [
        f"<think>\nIn May she sold 48/2 =\n</think>\n{write_call('48/2')}<|im_end|>",
        f"<think>\n24 clips.\nShe sold 48+24 =\n</think>\n{write_call('48+24')}<|im_end|>",
        "<think>\n72 clips, a lot of clips.\n</think>\n\n#### 72<|im_end|>",
    ]


def list_trained_spans(sample):
    """Contiguous trained spans of a sample."""
    spans, was_sampled = [], False
    for token_id, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True):
        if is_sampled and not was_sampled:
            spans.append([])
        if is_sampled:
            spans[-1].append(token_id)
        was_sampled = is_sampled
    return [tuple(span) for span in spans]


def join_turns(turns):
    task = Task(task_id="t/0", index=0, row=TASK)
    group = Group(task=task, trajectories=(Trajectory(task=task, run_index=0, turns=turns, reward=1.0),))
    return build_samples([group], [[1.0]])[0]


@pytest.mark.parametrize(("room", "num_turns"), [(2, 1), (-2000, 0)])
def test_a_full_context_ends_the_rollout_with_its_text_so_far(room, num_turns):
    """No room for an answer after the first tool result, or none after the question."""
    _, (turn, _), _ = run(write_call("48/2"), "#### 24")
    tokenizer = build_chat_tokenizer(QWEN25)
    max_model_len = max(1, len(turn.prompt_ids) + len(turn.sampled_ids) + room)
    engine = FakeEngine(tokenizer, say(tokenizer, write_call("48/2")), max_model_len=max_model_len)
    service = ModelService(engine, Renderer(tokenizer), model_name="m", sampling=Sampling(max_tokens=500))
    bound = service.open(seed=1)
    output = asyncio.run(calculator_agent(task=dict(TASK), model=bound.model))
    assert (output.metrics["tool_calls"], output.response.answer) == (num_turns, "")
    assert len(bound.close()) == num_turns
