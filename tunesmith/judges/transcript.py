"""Transcripts: the input of judges, made of replies with reasoning, content, tool calls and tool results.

A reply contains only text that the policy wrote. A workflow may return a `Transcript`; text, a message, a list of
messages, and objects with `build_replies` (transcripts of environments) are converted to one. Reasoning and calls in
tags are parsed as in sampled text, so an empty reasoning tag gives no reasoning, and a malformed call stays content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.chat.messages import Message, parse_messages
from tunesmith.chat.parsers import parse_reply
from tunesmith.chat.parsers.hermes import HERMES
from tunesmith.judges.numeric import read_text

MARKUP = re.compile(r"</?(?:think|tool_call|tool_response)>")
FAKE_TOOL_TEXT = re.compile(r"<(tool_call|tool_response)>.*?(?:</\1>|\Z)", re.DOTALL)
"""Text in content that only looks like a tool call or a tool result."""
CHARACTERS_PER_WORD = 8
"""A text has at least one word per this many characters, so leaving out spaces gains nothing; prose has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRecord:
    """One tool call of a reply, with its result."""

    name: str
    arguments: str
    """JSON text."""
    result: str | None = None
    """The tool's result; None if the tool was not called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One assistant message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCallRecord, ...] = ()

    @property
    def text(self) -> str:
        """Everything the policy wrote: reasoning, content and call arguments."""
        return "\n".join(part for part in (self.reasoning, self.content, *(c.arguments for c in self.calls)) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The replies of one rollout, in order."""

    replies: tuple[Reply, ...]

    @property
    def calls(self) -> tuple[ToolCallRecord, ...]:
        return tuple(call for reply in self.replies for call in reply.calls)

    @property
    def reasoning(self) -> str:
        """All reasoning, a line break between replies."""
        return "\n".join(reply.reasoning for reply in self.replies if reply.reasoning)

    @property
    def answer(self) -> str:
        """Content of the last reply; empty if its reasoning never ends or it calls a tool.

        Tool results, and text of the policy that imitates one, are removed.
        """
        if not self.replies or self.replies[-1].calls:
            return ""
        return FAKE_TOOL_TEXT.sub("", self.replies[-1].content).strip()

    @property
    def num_words(self) -> int:
        """Number of words in all replies, at least one per `CHARACTERS_PER_WORD` characters of a reply."""
        return sum(max(len(reply.text.split()), len(reply.text) // CHARACTERS_PER_WORD) for reply in self.replies)

    def get_text_content(self) -> str:
        """Content of the last reply; named as in AgentScope's messages."""
        return self.replies[-1].content if self.replies else ""


def build_transcript(messages: Sequence[Mapping[str, Any]]) -> Transcript:
    """Convert the assistant and tool messages of a conversation in chat completion format."""
    parsed = parse_messages(list(messages))
    replies = []
    results: dict[str | None, list[str | None]] = {}
    for message in reversed(parsed):  # ids may repeat: a call has the first result after it that no later call has
        if message.role == "tool":
            results.setdefault(message.tool_call_id, []).append(message.content)
        elif message.role == "assistant":
            replies.append(_read_reply(message, results))
    return Transcript(replies=tuple(reversed(replies)))


def read_transcript(response: Any) -> Transcript:
    if isinstance(response, Transcript):
        return response
    if hasattr(response, "build_replies"):
        return Transcript(replies=response.build_replies())
    if isinstance(response, Mapping) and "messages" in response:
        return build_transcript(response["messages"])
    if isinstance(response, Sequence) and not isinstance(response, str):
        return build_transcript(response)
    return Transcript(replies=(_read_reply(Message(role="assistant", content=read_text(response)), {}),))


def _read_reply(message: Message, results: Mapping[str | None, list[str | None]]) -> Reply:
    """Parse tags in the content, whose calls have no results; calls that are already structured are kept, and take the
    last of their results."""
    parsed = parse_reply(message.content, HERMES)
    calls = [ToolCallRecord(name=each.name, arguments=each.arguments) for each in parsed.tool_calls]
    for each in message.tool_calls:
        result = (results.get(each.call_id) or [None]).pop()
        calls.append(ToolCallRecord(name=each.name, arguments=each.arguments, result=result))
    reasoning = "\n".join(part for part in (message.reasoning, parsed.reasoning) if part)
    return Reply(reasoning=reasoning, content=parsed.content, calls=tuple(calls))
