"""`create_chat_completion` sends the model's options, overridden by fields of the call."""

from __future__ import annotations

import asyncio

import pytest

from chat_templates import QWEN25
from fakes import FakeEngine, build_chat_tokenizer, say
from tunesmith.chat.client import create_chat_completion
from tunesmith.chat.renderer import Renderer
from tunesmith.compat.chat_models import build_agentscope_model, has_agentscope
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling

TOKENIZER = build_chat_tokenizer(QWEN25)
OPTIONS = {"temperature": 0.5, "max_tokens": 7, "extra_body": {"top_k": 3}}
BUILDERS = [ChatModel, build_agentscope_model] if has_agentscope() else [ChatModel]


@pytest.mark.parametrize("build", BUILDERS)
def test_fields_of_the_call_override_options_of_the_model(build):
    engine = FakeEngine(TOKENIZER, say(TOKENIZER, "Hello."))
    service = ModelService(
        engine,
        Renderer(TOKENIZER),
        model_name="m",
        sampling=Sampling(max_tokens=100),
        build_model=lambda endpoint: build(endpoint, options=OPTIONS),
    )
    model = service.open(seed=1).model
    completion = asyncio.run(create_chat_completion(model, [{"role": "user", "content": "Hi."}], temperature=0.25))
    assert completion.choices[0].message.content == "Hello."
    ((_, sampling, _),) = engine.requests
    assert (sampling.distribution.temperature, sampling.distribution.top_k, sampling.max_tokens) == (0.25, 3, 7)
    assert model.options == OPTIONS
