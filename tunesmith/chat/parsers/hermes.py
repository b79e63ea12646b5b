"""Tool calls of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from tunesmith.chat.parsers.call_format import Block, CallFormat, Tools, find_close, load_json, read_call

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    ends = find_close(text, CALL_CLOSE, len(CALL_OPEN), is_end=is_end)
    if ends is None:
        return None
    body_end, length = ends
    try:
        call = read_call(load_json(text[len(CALL_OPEN) : body_end]))
    except ValueError:
        call = None
    return Block(length=length, calls=() if call is None else (call,))


HERMES = CallFormat(
    name="hermes", openers=(CALL_OPEN,), template_tags=(CALL_OPEN,), close=CALL_CLOSE, read_block=read_hermes
)
