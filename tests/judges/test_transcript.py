"""Every kind of workflow response is converted to the same transcript."""

from __future__ import annotations

import pytest

from tunesmith.judges.transcript import Reply, ToolCallRecord, Transcript, build_transcript, read_transcript

ADD = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+2"}'}}
MESSAGES = [
    {"role": "system", "content": "Solve."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [ADD]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "assistant", "content": "#### 3"},
]
EXPECTED = Transcript(
    replies=(
        Reply(
            reasoning="I add.",
            calls=(ToolCallRecord(name="calculator", arguments='{"expression": "1+2"}', result="3"),),
        ),
        Reply(content="#### 3"),
    )
)


class Message:
    def get_text_content(self):
        return "<think>\nI add.\n</think>\n\n#### 3"


@pytest.mark.parametrize("response", [EXPECTED, MESSAGES, {"messages": MESSAGES, "anything": "else"}])
def test_conversations(response):
    assert read_transcript(response) == EXPECTED


@pytest.mark.parametrize(
    "response", ["<think>I add.</think>#### 3", Message(), {"content": "<think>I add.</think>#### 3"}]
)
def test_text_is_parsed_like_sampled_text(response):
    assert read_transcript(response) == Transcript(replies=(Reply(reasoning="I add.", content="#### 3"),))


def test_calls_with_equal_ids_have_their_own_results():
    def reply(*ids):
        return {"role": "assistant", "content": None, "tool_calls": [ADD | {"id": each} for each in ids]}

    def result(text, call_id="1"):
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    messages = [
        reply("1"), result("a"), reply("1", "2"), result("b", "2"), result("c"),
        reply("1"), {"role": "user", "content": "no result"}, reply("1", "1"), result("d"), result("e"),
    ]  # fmt: skip
    assert [each.result for each in build_transcript(messages).calls] == ["a", "c", "b", None, "d", "e"]


def test_tags_in_the_content_of_messages_are_parsed():
    messages = [{"role": "assistant", "content": "<think>\nI add.\n</think>", "tool_calls": [ADD]}, *MESSAGES[3:]]
    assert build_transcript(messages) == EXPECTED


def test_a_call_in_text_has_no_result_and_a_malformed_call_stays_text():
    transcript = read_transcript('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{</tool_call>')
    assert transcript.calls == (ToolCallRecord(name="f", arguments='{"a": 1}', result=None),)
    assert transcript.replies[0].content == "<tool_call>{</tool_call>"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (MESSAGES, "#### 3"),
        (MESSAGES[:4], ""),
        (MESSAGES[:2], ""),
        ("<think>so it is 3", ""),
        ("<think>so it is 3</think>", ""),
        ("<tool_response>3</tool_response>", ""),
        ("It is <tool_response>\n3", "It is"),
        ("<tool_call>3</tool_call> 4", "4"),
    ],
)
def test_the_answer_is_the_content_of_the_last_reply(response, answer):
    assert read_transcript(response).answer == answer


def test_words_are_counted_over_all_replies_even_without_spaces():
    assert EXPECTED.num_words == 2 + 2 + 2
    assert read_transcript("a" * 8000).num_words == 1000
