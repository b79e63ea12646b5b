"""Tool calls of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from tunesmith.chat.parsers.call_format import Block, CallFormat, ReadCall, Tools, build_call, find_close, load_json

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    ends = find_close(text, CALL_CLOSE, len(CALL_OPEN), is_end=is_end)
    if ends is None:
        return None
    body_end, length = ends
    call = _parse(text[len(CALL_OPEN) : body_end])
    return Block(length=length, calls=() if call is None else (call,))


def _parse(body: str) -> ReadCall | None:
    """The call in `{"name": str, "arguments": object}`; None for another text."""
    try:
        call = load_json(body)
    except ValueError:
        return None
    return build_call(call.get("name"), call.get("arguments")) if isinstance(call, dict) else None


HERMES = CallFormat(
    name="hermes", openers=(CALL_OPEN,), template_tags=(CALL_OPEN,), close=CALL_CLOSE, read_block=read_hermes
)
