"""The text of recorded replies, so that a request can continue a reply instead of answering it.

A request with `continue_final_message` sends the assistant's text so far: what was sampled, and what the agent
appended, such as the result of a tool. The recorded reply whose text is the longest beginning of it is continued: its
prompt ids, its sampled ids, then the encoded rest. Sampled text is never tokenized again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tunesmith.chat.messages import MatchKey
from tunesmith.types import Turn

Conversation = tuple[tuple[MatchKey, ...], str]
"""Match keys of the messages before the reply, and their scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyText:
    """A recorded reply and its text, with the part that earlier turns wrote."""

    choice_id: tuple[int, int]
    turn: Turn
    text: str

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of prompt and text; an end-of-sequence token is left out."""
        sampled = self.turn.sampled_ids[:-1] if self.turn.stop_reason == "eos" else self.turn.sampled_ids
        return self.turn.prompt_ids + sampled


@dataclass(slots=True, kw_only=True)
class ReplyTexts:
    """The reply texts of one session."""

    _replies: dict[Conversation, list[ReplyText]] = field(default_factory=dict)

    def add(self, conversation: Conversation, reply: ReplyText) -> None:
        self._replies.setdefault(conversation, []).append(reply)

    def find(self, conversation: Conversation, text: str) -> ReplyText | None:
        """The reply with the longest text that `text` begins with; of equal texts the last."""
        found = [each for each in self._replies.get(conversation, ()) if text.startswith(each.text)]
        return max(found, key=lambda each: (len(each.text), each.choice_id), default=None)
