"""A model service on a scripted engine, and a function that sends one request to it."""

from __future__ import annotations

from chat_templates import CHATML, QWEN25, THINKING
from fakes import FakeEngine, Script, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.service import ModelService
from tunesmith.types import Distribution, Sampling

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SUB = '<tool_call>\n{"name": "sub", "arguments": {"b": "\u00e9"}}\n</tool_call>'
USER = [{"role": "user", "content": "hi"}]
DEFAULTS = Sampling(distribution=Distribution(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1), max_tokens=300)

TOKENIZERS = {template: build_chat_tokenizer(template) for template in (CHATML, QWEN25, THINKING)}


def build_service(*replies: str, script: Script | None = None, template: str = QWEN25, **options) -> ModelService:
    tokenizer = TOKENIZERS[template]
    engine = FakeEngine(tokenizer, script or say(tokenizer, *replies), **options)
    return ModelService(engine, Renderer(tokenizer), model_name="m", sampling=DEFAULTS)


def get_engine(service: ModelService) -> FakeEngine:
    return service.recorder.engine


async def create_completion(service: ModelService, messages=USER, **fields):
    """Send one request in a new session; returns the completion (or its chunks) and the recorded turns."""
    bound = service.open(seed=1)
    try:
        completion = await bound.model.client.chat.completions.create(model="m", messages=messages, **fields)
        if fields.get("stream"):
            completion = [chunk async for chunk in completion]
    finally:
        turns = bound.close()
    return completion, turns
