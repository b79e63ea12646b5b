"""Recorded replies and their text, so that a request can continue a reply or send it back with more text.

A request with `continue_final_message` sends the assistant's text so far: what was sampled, and what the agent
appended, such as the result of a tool. The recorded reply whose text is the longest beginning of it is continued: its
prompt ids, its sampled ids, then the encoded rest. Sampled text is never tokenized again. A stop string that was
sampled is part of this text, also where the response left it out.

An agent may also append to the assistant's message and then add other messages. That extends the turn only if all its
sampled ids are text that the message begins with: not if it ended by an end-of-sequence token, which the template
writes after the appended text.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.chat.messages import MatchKey, Message
from tunesmith.chat.renderer import Renderer
from tunesmith.types import Turn

Conversation = tuple[tuple[MatchKey, ...], str]
"""Match keys of the messages before the reply, and their scope."""


ChoiceId = tuple[int, int]
"""Index of the call in its session, and index of the choice in its call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply:
    """A finished turn and its parsed reply; later calls may extend or continue it."""

    choice_id: ChoiceId
    turn: Turn
    keys: tuple[MatchKey, ...]
    """Match keys of the conversation up to the reply."""
    message: Message
    """The reply, with the part that earlier turns wrote: `reply_start`."""
    reply_start: str
    cut_stop: str
    """The stop string that was cut off it."""
    has_prefix: bool
    """The reply began with tokens that were not sampled."""

    def count_equal(self, sent: Message) -> int:
        """How much of what match keys leave out a client sent back unchanged: ids of calls, and reasoning unless it is
        dropped."""
        sent_ids, own_ids = ([call.call_id for call in each.tool_calls] for each in (sent, self.message))
        return (sent_ids == own_ids) + (sent.reasoning in (None, self.message.reasoning))

    @property
    def text(self) -> str | None:
        """Up to the end of the stop string; None if the reply has reasoning, which a request cannot continue."""
        return None if self.message.reasoning is not None else self.message.content + self.cut_stop

    def decode_whole(self, renderer: Renderer) -> str:
        """With the stop string and what was sampled after it, without reasoning; empty if sampled ids are not text."""
        if self.turn.stop_reason not in ("stop", "length") or self.has_prefix:
            return ""
        sampled = renderer.decode_text(self.turn.sampled_ids, has_reasoning=self.message.reasoning is not None)
        return sampled and self.reply_start + sampled

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of prompt and text; an end-of-sequence token is left out."""
        sampled = self.turn.sampled_ids[:-1] if self.turn.stop_reason == "eos" else self.turn.sampled_ids
        return self.turn.prompt_ids + sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTurn:
    """The recorded turn that a request continues."""

    turn: Turn
    num_messages: int
    """Messages of the request up to the turn's reply."""
    appended: str = ""
    """Text that the request's message has after the reply's."""


class ReplyTexts:
    """The replies of one session that call no tools, by their text; it is computed when a request may need it."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._replies: dict[Conversation, list[RecordedReply]] = {}

    def add(self, conversation: Conversation, reply: RecordedReply) -> None:
        self._replies.setdefault(conversation, []).append(reply)

    def find_extended(self, conversation: Conversation, message: Message) -> tuple[RecordedReply, str] | None:
        """The reply whose whole text the message begins with, and the rest of the message."""
        replies = () if message.tool_calls else self._replies.get(conversation, ())
        rests = [(each, _find_rest(message.content, each.decode_whole(self._renderer))) for each in replies]
        found = [(each, rest) for each, rest in rests if rest is not None]
        return max(found, key=lambda each: (-len(each[1]), each[0].choice_id), default=None)

    def find(self, conversation: Conversation, text: str) -> RecordedReply | None:
        """The reply with the longest text that `text` begins with; of equal texts the last."""
        found = [
            each for each in self._replies.get(conversation, ()) if each.text is not None and text.startswith(each.text)
        ]
        return max(found, key=lambda each: (len(each.text or ""), each.choice_id), default=None)


def _find_rest(content: str, text: str) -> str | None:
    """What the content has after the text; None if it does not begin with it. Whitespace around both is ignored."""
    content, text = content.lstrip(), text.lstrip()
    if text and content.rstrip() == text.rstrip():
        return ""
    return content[len(text) :] if text and content.startswith(text) else None
