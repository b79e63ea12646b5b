"""Renderers for test templates, and conversations for them."""

from __future__ import annotations

from fakes import build_chat_tokenizer
from tunesmith.chat.messages import parse_messages, parse_tools
from tunesmith.chat.renderer import Prompt, Renderer

USER = {"role": "user", "content": "q"}
NEXT = {"role": "user", "content": "next"}

TOOLS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Computes",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
                "strict": True,
            },
        }
    ]
)
CALL = {"id": "call1", "type": "function", "function": {"name": "calculator", "arguments": '{"a": 1}'}}


def build_renderer(template: str, **options) -> Renderer:
    return Renderer(build_chat_tokenizer(template), **options)


def to_text(renderer: Renderer, ids) -> str:
    return "".join(renderer.format_token(i) for i in ids)


def make_prompt(*messages: dict, tools=()) -> Prompt:
    return Prompt(messages=parse_messages(list(messages)), tools=tools)


def extend(renderer: Renderer, history: list[dict], sampled: str, reply: dict, new: list[dict], *, end="<|im_end|>"):
    """The first prompt, the sampled ids, and the prompt that extends them."""
    tools = TOOLS if reply.get("tool_calls") else ()
    prompt_ids = renderer.render(make_prompt(*history, tools=tools))
    sampled_ids = renderer.encode(sampled + end)
    extended = renderer.extend(
        make_prompt(*history, reply, *new, tools=tools),
        num_old=len(history) + 1,
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        is_ended=bool(end),
    )
    return prompt_ids, sampled_ids, extended
