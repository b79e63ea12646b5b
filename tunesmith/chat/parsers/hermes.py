"""Tool calls of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from tunesmith.chat.parsers.call_format import Block, CallFormat, ReadCall, build_call, load_json

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


class ClosingTag:
    """Finds the `</tool_call>` that ends a call; at the end of the reply it may be missing."""

    def __init__(self) -> None:
        self._position = len(CALL_OPEN)

    def find(self, text: str, *, is_end: bool) -> tuple[int, int] | None:
        """Where the text between the tags ends, and where the call ends; None if the call needs more text."""
        end = text.find(CALL_CLOSE, self._position)
        if end < 0 and not is_end:
            self._position = max(len(CALL_OPEN), len(text) - len(CALL_CLOSE) + 1)
            return None
        return (len(text), len(text)) if end < 0 else (end, end + len(CALL_CLOSE))


class _HermesReader:
    """Reads one call."""

    def __init__(self) -> None:
        self._tag = ClosingTag()

    def read(self, text: str, *, is_end: bool) -> Block | None:
        ends = self._tag.find(text, is_end=is_end)
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
    name="hermes",
    openers=(CALL_OPEN,),
    template_tags=(CALL_OPEN,),
    close=CALL_CLOSE,
    arguments_start=r'\{\s*"a"',
    open_reader=lambda tools: _HermesReader(),
)
