"""What an agent said, as judges read it: replies with reasoning, content and tool calls, and the calls' results.

Only what the policy itself wrote is in a reply. A workflow may return a `Transcript`; whatever else it returns, text,
a message or a list of messages, is read into one. Reasoning and calls that stand in text as tags are read as they are
when a model is sampled, so a tag without content is no reasoning, and a malformed call stays content.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.chat.messages import Message, parse_messages
from tunesmith.chat.parsers import ReplyParser
from tunesmith.judges.numeric import read_text

MARKUP = re.compile(r"</?(?:think|tool_call|tool_response)>")
FAKED = re.compile(r"<(tool_call|tool_response)>.*?(?:</\1>|\Z)", re.DOTALL)
"""Text that only looks like a call or a result."""
CHARACTERS_PER_WORD = 8
"""A text of more than these counts as more words than it has spaces; prose stays below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call of a reply."""

    name: str
    arguments: str
    """JSON text."""
    result: str | None = None
    """What the tool said; None when it was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One assistant message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def text(self) -> str:
        """All that the policy wrote."""
        return "\n".join(part for part in (self.reasoning, self.content, *(c.arguments for c in self.calls)) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The replies of one run, in order."""

    replies: tuple[Reply, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for reply in self.replies for call in reply.calls)

    @property
    def reasoning(self) -> str:
        """All reasoning, a line break between replies."""
        return "\n".join(reply.reasoning for reply in self.replies if reply.reasoning)

    @property
    def answer(self) -> str:
        """What the last reply says to the user; empty when it reasons without end or calls a tool.

        Results of tools are not in it, nor what the policy makes look like one.
        """
        if not self.replies or self.replies[-1].calls:
            return ""
        return FAKED.sub("", self.replies[-1].content).strip()

    @property
    def num_words(self) -> int:
        """Words of all replies; a stretch without spaces counts as the words that it has room for."""
        return sum(max(len(reply.text.split()), len(reply.text) // CHARACTERS_PER_WORD) for reply in self.replies)

    def get_text_content(self) -> str:
        """The last reply's content, as AgentScope's messages call it."""
        return self.replies[-1].content if self.replies else ""


def build_transcript(messages: Sequence[Mapping[str, Any]]) -> Transcript:
    """Read the assistant and tool messages of a conversation, in the form of a chat request."""
    parsed = parse_messages(list(messages))
    results = {m.tool_call_id: m.content for m in parsed if m.role == "tool"}
    return Transcript(replies=tuple(_read_reply(m, results) for m in parsed if m.role == "assistant"))


def read_transcript(response: Any) -> Transcript:
    """The transcript of whatever a workflow returned."""
    if isinstance(response, Transcript):
        return response
    if isinstance(response, Mapping) and "messages" in response:
        return build_transcript(response["messages"])
    if isinstance(response, Sequence) and not isinstance(response, str):
        return build_transcript(response)
    return Transcript(replies=(_read_reply(Message(role="assistant", content=read_text(response)), {}),))


def _read_reply(message: Message, results: Mapping[str | None, str]) -> Reply:
    """Split content that holds tags; calls that a client has read already are kept as they are."""
    numbers = itertools.count()
    parser = ReplyParser(new_call_id=lambda: f"text{next(numbers)}", has_reasoning=True, has_tool_calls=True)
    said = parser.parse(message.content)
    calls = (*said.tool_calls, *message.tool_calls)
    return Reply(
        reasoning="\n".join(part for part in (message.reasoning, said.reasoning) if part),
        content=said.content,
        calls=tuple(Call(name=c.name, arguments=c.arguments, result=results.get(c.call_id)) for c in calls),
    )
