"""AgentScope 1.x: its ReActAgent with the endpoint, as in workflows."""

from __future__ import annotations

import itertools
import json

import openai
import pytest
from pydantic import BaseModel

from chat_templates import CHATML, QWEN3, QWEN25
from fakes import FakeEngine, Script, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.errors import ConfigError
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling, Turn

pytest.importorskip("agentscope.memory", reason="AgentScope 1.x is not installed")

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse

from tunesmith.compat.chat_models import build_agentscope_model

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'


async def calculator(expression: str) -> ToolResponse:
    """Compute.

    Args:
        expression (str): What to compute.
    """
    product = 1
    for factor in expression.split("*"):
        product *= int(factor)
    return ToolResponse(content=[TextBlock(type="text", text=str(product))])


def build_agent(model: OpenAIChatModel, **options) -> ReActAgent:
    toolkit = Toolkit()
    toolkit.register_tool_function(calculator)
    agent = ReActAgent(
        name="friday", sys_prompt="Help.", model=model, formatter=OpenAIChatFormatter(), toolkit=toolkit, **options
    )
    agent.set_console_output_enabled(False)
    return agent


def build_service(script: Script | None, *replies: str, template: str, is_stream: bool) -> ModelService:
    tokenizer = build_chat_tokenizer(template)
    return ModelService(
        FakeEngine(tokenizer, script or say(tokenizer, *replies)),
        Renderer(tokenizer),
        model_name="m",
        sampling=Sampling(max_tokens=500),
        build_model=lambda endpoint: build_agentscope_model(endpoint, is_stream=is_stream),
    )


def is_one_sequence(turns: tuple[Turn, ...]) -> bool:
    """Whether each prompt extends the previous turn token for token."""
    return all(
        later.prompt_ids[: len(turn.prompt_ids) + len(turn.sampled_ids)] == turn.prompt_ids + turn.sampled_ids
        for turn, later in itertools.pairwise(turns)
    )


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3])
@pytest.mark.parametrize("first", [CALL, f"I compute. {CALL}", f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}"])
async def test_react_agent_calls_a_tool_and_answers(is_stream, template, first):
    service = build_service(None, first, "It is 42.", template=template, is_stream=is_stream)
    bound = service.open(seed=1)
    assert isinstance(bound.model, OpenAIChatModel)
    reply = await build_agent(bound.model).reply(Msg("user", "What is 6 * 7?", "user"))
    assert reply.get_text_content() == "It is 42."
    turns = bound.close()
    assert len(turns) == 2
    assert is_one_sequence(turns)
    renderer = service.recorder.renderer
    assert renderer.decode(turns[1].prompt_ids).count("<tool_response>\n42\n</tool_response>") == first.count(CALL)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_parallel_tool_calls_run_together(is_stream):
    replies = (f"{CALL}\n{CALL.replace('7', '8')}", "42 and 48")
    service = build_service(None, *replies, template=QWEN25, is_stream=is_stream)
    bound = service.open(seed=1)
    await build_agent(bound.model, parallel_tool_calls=True).reply(Msg("user", "both?", "user"))
    turns = bound.close()
    text = service.recorder.renderer.decode(turns[1].prompt_ids)
    assert "<tool_response>\n42\n</tool_response>\n<tool_response>\n48\n</tool_response>" in text
    assert is_one_sequence(turns)


class Answer(BaseModel):
    """The requested structure."""

    value: int


@pytest.mark.parametrize("is_stream", [False, True])
async def test_structured_output_is_a_required_call(is_stream):
    """The agent sends tool_choice="required"; the prefix of each call is forced, the rest sampled."""
    tokenizer = build_chat_tokenizer(QWEN25)
    rests = iter(
        [
            'calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>',
            'generate_response", "arguments": {"value": 42}}\n</tool_call>',
            "done",
        ]
    )

    def script(prompt_ids, sampling, order):
        return [*tokenizer.encode(next(rests)), tokenizer.eos_token_id]

    service = build_service(script, template=QWEN25, is_stream=is_stream)
    bound = service.open(seed=1)
    agent = build_agent(bound.model)
    reply = await agent.reply(Msg("user", "What is 6 * 7?", "user"), structured_model=Answer)
    assert reply.metadata == {"value": 42}
    turns = bound.close()
    assert len(turns) == 3
    assert is_one_sequence(turns)
    ends = [service.recorder.renderer.decode(turn.prompt_ids)[-30:] for turn in turns]
    assert [end.endswith('<tool_call>\n{"name": "') for end in ends] == [True, True, False]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_structured_output_of_the_model_is_recorded(is_stream):
    """The model sends a response_format, which the engine's grammar would enforce."""
    service = build_service(None, '{"value": 42}', template=QWEN25, is_stream=is_stream)
    bound = service.open(seed=1)
    response = await bound.model([{"role": "user", "content": "6 * 7?"}], structured_model=Answer)
    if is_stream:
        *_, response = [chunk async for chunk in response]
    else:
        assert response.metadata == {"value": 42}
    (block,) = response.content
    assert json.loads(block["text"]) == {"value": 42}
    (turn,) = bound.close()
    assert '"value"' in turn.distribution.grammar


async def test_options_of_the_model_are_sent_with_each_call():
    tokenizer = build_chat_tokenizer(QWEN25)
    engine = FakeEngine(tokenizer, say(tokenizer, "x"))
    service = ModelService(
        engine,
        Renderer(tokenizer),
        model_name="m",
        sampling=Sampling(max_tokens=500),
        build_model=lambda endpoint: build_agentscope_model(
            endpoint, options={"temperature": 0.25, "extra_body": {"top_k": 7}}
        ),
    )
    bound = service.open(seed=1)
    await bound.model([{"role": "user", "content": "hi"}])
    ((_, sampling, _),) = engine.requests
    assert (sampling.distribution.temperature, sampling.distribution.top_k) == (0.25, 7)


async def test_base_url_is_the_servers_url_or_an_error():
    service = build_service(None, "x", template=QWEN25, is_stream=False)
    with pytest.raises(ConfigError, match=r"set rollout\.http_port"):
        _ = service.open(seed=1).model.base_url
    async with service.serve() as url:
        model = service.open(seed=1).model
        assert type(model).__name__ == "OpenAIChatModel"
        assert model.base_url == url == str(model.client.base_url).rstrip("/")
        async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            messages = [{"role": "user", "content": "hi"}]
            completion = await client.chat.completions.create(model=model.model_name, messages=messages)
    assert completion.choices[0].message.content == "x"
