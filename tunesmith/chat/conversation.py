"""Parsed conversations that are extended: the work of a request is that of its new messages.

Agents send the whole conversation with each request, and each request extends an earlier one. `ConversationCache` finds
the longest cached conversation that a request begins with, by its content, and parses only the messages that follow.
A `Conversation` holds what grows with it: messages, match keys, and digests that recorded replies are found by.

Conversations with equal match keys are the same conversation. Clients may send a message back in another form: null for
empty content, text parts for text, other spacing in JSON arguments, other tool call ids, no reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.chat.memo import build_cache_key
from tunesmith.chat.messages import MatchKey, Message, build_reply_key, parse_messages

LIST_HEADER_LENGTH = 5
"""Bytes before the items of a list in marshal's format: a type code and the number of items."""
NUM_CACHED_CONVERSATIONS = 4
"""Conversations that a cache holds: those of an agent and a few sub-agents."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversation:
    """Messages, and what identifies them."""

    messages: tuple[Message, ...] = ()
    content: bytes = b""
    """The messages as sent, in marshal's format, if the conversation is cached; it begins with that of its start."""
    keys: tuple[MatchKey, ...] = ()
    """One of each message; tool calls are identified by their position in the conversation, not by their ids."""
    call_positions: Mapping[str | None, int] = field(default_factory=dict)
    """Id of a tool call -> its position."""
    num_calls: int = 0
    next_result: int = 0
    """Position of the call that a result without an id belongs to."""
    num_characters: int = 0
    """Characters of content and reasoning in all messages."""
    digest: int = 0
    """A digest of the match keys."""
    reply_digests: tuple[tuple[int, int], ...] = ()
    """For each assistant message: the number of messages up to it, and the digest of their keys."""

    def extend(self, messages: Sequence[Message], *, content: bytes = b"") -> Conversation:
        """This conversation and more messages; `content` is that of all of them."""
        keys, digest, reply_digests = list(self.keys), self.digest, list(self.reply_digests)
        call_positions, num_calls, next_result = dict(self.call_positions), self.num_calls, self.next_result
        for message in messages:
            if message.role == "assistant":
                next_result = num_calls
                for call in message.tool_calls:
                    call_positions[call.call_id] = num_calls
                    num_calls += 1
                keys.append(build_reply_key(message))
            elif message.role == "tool":
                call_id = message.tool_call_id
                position = call_positions.get(call_id, next_result) if call_id else next_result
                next_result = position + 1
                keys.append((message.role, message.content.strip(), position))
            else:
                keys.append((message.role, message.content.strip(), message.name))
            digest = hash((digest, keys[-1]))
            if message.role == "assistant":
                reply_digests.append((len(keys), digest))
        return Conversation(
            messages=(*self.messages, *messages),
            content=content,
            keys=tuple(keys),
            call_positions=call_positions,
            num_calls=num_calls,
            next_result=next_result,
            num_characters=self.num_characters + sum(message.num_characters for message in messages),
            digest=digest,
            reply_digests=tuple(reply_digests),
        )

    def identify_reply(self, reply: Message) -> tuple[int, tuple[MatchKey, ...]]:
        key = build_reply_key(reply)
        return hash((self.digest, key)), (*self.keys, key)


EMPTY = Conversation()


def compute_match_keys(messages: Sequence[Message]) -> tuple[MatchKey, ...]:
    return EMPTY.extend(messages).keys


class ConversationCache:
    """The last conversations of one session."""

    def __init__(self) -> None:
        self._conversations: list[Conversation] = []
        """Least recently used first."""

    def parse(self, raw: Any) -> tuple[Message, ...]:
        """The `messages` of a request, as `parse_messages` parses them."""
        cache_key = build_cache_key(raw) if type(raw) is list and raw else None
        if cache_key is None:
            return parse_messages(raw)
        content = cache_key[LIST_HEADER_LENGTH:]
        starts = [each for each in self._conversations if content.startswith(each.content)]
        start = max(starts, key=lambda each: len(each.messages), default=EMPTY)
        num_old = len(start.messages)
        if num_old == len(raw):
            return start.messages
        conversation = start.extend(parse_messages(raw, first=num_old), content=content)
        others = [each for each in self._conversations if each is not start]
        self._conversations = [*others[1 - NUM_CACHED_CONVERSATIONS :], conversation]
        return conversation.messages

    def find(self, messages: tuple[Message, ...]) -> Conversation:
        """The conversation of messages that `parse` has returned; a new one for all others."""
        for each in self._conversations:
            if each.messages is messages:
                return each
        return EMPTY.extend(messages)
