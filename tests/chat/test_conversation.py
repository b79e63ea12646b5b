"""Conversations that are parsed as they grow equal those parsed at once."""

from __future__ import annotations

import copy
import random

import pytest

from tunesmith.chat.conversation import EMPTY, ConversationCache, compute_match_keys
from tunesmith.chat.messages import parse_messages


def build_message(rng: random.Random, position: int) -> dict[str, object]:
    kind = rng.choice(["user", "assistant", "call", "tool", "parts", "system"])
    text = rng.choice(["one", " two ", "\ud800", "\u20ac" * 3, ""])
    if kind == "call":
        calls = [
            {"id": f"c{position}-{index}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            for index in range(rng.randint(1, 3))
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": text}
    if kind == "tool":
        return {"role": "tool", "content": text, "tool_call_id": f"c{rng.randint(0, position)}-0"}
    if kind == "parts":
        return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": "end"}]}
    return {"role": kind, "content": text}


@pytest.mark.parametrize("seed", range(20))
def test_a_growing_conversation_is_parsed_as_if_it_were_new(seed):
    rng, cache = random.Random(seed), ConversationCache()
    raw = []
    for _ in range(40):
        action = rng.random()
        if action < 0.1:
            raw = []
        elif action < 0.2:
            raw = raw[: rng.randint(0, len(raw))]
        elif action < 0.3 and raw:
            raw[rng.randrange(len(raw))]["content"] = rng.choice(["changed", "one"])  # in place
        raw += [build_message(rng, len(raw)) for _ in range(rng.randint(0 if raw else 1, 3))]
        messages = cache.parse(raw)
        assert messages == parse_messages(copy.deepcopy(raw))
        found, alone = cache.find(messages), EMPTY.extend(messages)
        assert found.messages == messages
        assert found.keys == alone.keys == compute_match_keys(messages)
        assert (found.digest, found.reply_digests) == (alone.digest, alone.reply_digests)
        assert found.num_characters == sum(len(each.content) + len(each.reasoning or "") for each in messages)


def test_digests_identify_the_conversation_up_to_each_reply():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    conversation = EMPTY.extend(parse_messages(turns[:1]))
    [reply] = parse_messages([turns[1]])
    digest, keys = conversation.identify_reply(reply)
    whole = EMPTY.extend(parse_messages(turns))
    assert whole.reply_digests == ((2, digest),)
    assert whole.keys[:2] == keys


def test_only_new_messages_are_parsed():
    cache = ConversationCache()
    raw = [{"role": "user", "content": str(index)} for index in range(3)]
    first = cache.parse(raw)
    second = cache.parse([*raw, {"role": "user", "content": "3"}])
    assert all(old is new for old, new in zip(first, second, strict=False))
    assert cache.parse([*raw, {"role": "user", "content": "3"}]) is second


def test_errors_name_the_position_in_the_whole_conversation():
    cache = ConversationCache()
    raw = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    cache.parse(raw)
    with pytest.raises(ValueError, match=r"messages\[2\]\.role"):
        cache.parse([*raw, {"role": "nobody", "content": "three"}])
    for wrong in (None, [], "hi", {}, [1]):
        with pytest.raises(ValueError, match="messages"):
            cache.parse(wrong)


def test_equal_numbers_of_other_types_are_other_content():
    """1, 1.0 and True are equal in Python; as content they are three different errors."""
    cache = ConversationCache()
    cache.parse([{"role": "user", "content": "x", "extra": 1}])
    for value in (1.0, True):
        cache.parse([{"role": "user", "content": "x", "extra": value}])
    assert len(cache._conversations) == 3
