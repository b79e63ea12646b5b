"""Pieces of an assistant message, as a parser finds them in sampled text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tunesmith.chat.messages import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one piece of text adds to the message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


def join_deltas(deltas: Iterable[Delta]) -> Message:
    """Concatenate deltas into the assistant message."""
    deltas = list(deltas)
    return Message(
        role="assistant",
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas) or None,
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
    )
