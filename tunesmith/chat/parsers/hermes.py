"""Tool calls of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from tunesmith.chat.parsers.call_format import CallFormat, ReadCall, TaggedReader, build_call, load_json

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


def _read_call(body: str) -> tuple[ReadCall, ...]:
    """The call in `{"name": str, "arguments": object}`; none in another text."""
    try:
        fields = load_json(body)
    except ValueError:
        return ()
    call = build_call(fields.get("name"), fields.get("arguments")) if isinstance(fields, dict) else None
    return () if call is None else (call,)


HERMES = CallFormat(
    name="hermes",
    openers=(CALL_OPEN,),
    template_tags=(CALL_OPEN,),
    close=CALL_CLOSE,
    arguments_start=r'\{\s*"a"',
    open_reader=lambda tools: TaggedReader(
        CALL_OPEN, CALL_CLOSE, lambda body, is_closed: _read_call(body), is_whole=True
    ),
)
