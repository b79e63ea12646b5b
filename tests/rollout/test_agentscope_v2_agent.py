"""AgentScope 2.x: its Agent with the endpoint, as in workflows."""

from __future__ import annotations

import pytest

from chat_templates import QWEN25
from fakes import FakeEngine, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.compat.chat_models import build_agentscope_model
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling

pytest.importorskip("agentscope.credential", reason="AgentScope 2.x is not installed")

from agentscope.agent import Agent
from agentscope.message import UserMsg
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


async def multiply(a: int, b: int) -> str:
    """Multiply.

    Args:
        a (int): A factor.
        b (int): Another factor.
    """
    return str(a * b)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_agent_calls_a_tool_and_answers(is_stream):
    tokenizer = build_chat_tokenizer(QWEN25)
    engine = FakeEngine(tokenizer, say(tokenizer, CALL, "It is 42."))
    service = ModelService(
        engine,
        Renderer(tokenizer),
        model_name="m",
        sampling=Sampling(max_tokens=500),
        build_model=lambda endpoint: build_agentscope_model(
            endpoint, options={"temperature": 0.5, "extra_body": {"top_k": 3}}, is_stream=is_stream
        ),
    )
    bound = service.open(seed=1)
    assert bound.model.context_size == engine.max_model_len  # where its agents compress their context
    agent = Agent(
        name="friday",
        system_prompt="Help.",
        model=bound.model,
        toolkit=Toolkit(tools=[FunctionTool(multiply)]),
        state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)),
    )
    reply = await agent.reply(UserMsg("user", "What is 6 * 7?"))
    assert reply.get_text_content() == "It is 42."
    first, second = bound.close()
    tokens = first.prompt_ids + first.sampled_ids
    assert second.prompt_ids[: len(tokens)] == tokens
    assert "<tool_response>\n42\n</tool_response>" in service.recorder.renderer.decode(second.prompt_ids)
    distribution = engine.requests[0][1].distribution
    assert (distribution.temperature, distribution.top_k) == (0.5, 3)
