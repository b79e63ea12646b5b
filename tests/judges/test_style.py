"""Format, reasoning and conciseness: honest answers score, empty imitations do not."""

from __future__ import annotations

import pytest
from transcripts import GOOD, TASK, call, replies

from tunesmith.judges.style import (
    compute_useful_share,
    count_steps,
    is_operation,
    list_original_pieces,
    score_conciseness,
    score_format,
    score_reasoning,
)
from tunesmith.judges.transcript import Reply, read_transcript

THOUGHT = "<think>She sold 48/2 = 24 in May.\nIn all that is 48+24 = 72.</think>"


def test_a_good_conversation_gets_full_scores():
    for score in (score_format, score_reasoning, score_conciseness):
        assert score(TASK, GOOD) == 1.0
        assert score(TASK, read_transcript(f"{THOUGHT}\n\n#### 72")) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}\nShe sold 72.\n#### 72", 1.0),
        (f"{THOUGHT}\n#### $1,072.50", 1.0),
        ("#### 72", 0.5),
        ("She sold 72.", 0.0),
        (f"{THOUGHT}\nShe sold 72.", 0.5),
        (f"{THOUGHT}\n#### 72\nor 71", 0.5),  # text after the answer
        (f"{THOUGHT}\n#### 72 or 71", 0.5),
        (f"{THOUGHT}\n#### 71\n#### 72", 0.5),  # several answers
        (f"{THOUGHT}\n#### seventy-two", 0.5),
        ("<think></think>#### 72", 0.5),  # tags without content
        ("<think> \n </think>#### 72", 0.5),
        ("<think>ok</think>#### 72", 0.75),
        ("<think>........................</think>#### 72", 0.75),
        ("<think>" + "aaaa " * 50 + "</think>#### 72", 0.75),
        (f"<think>{TASK['question']}</think>#### 72", 0.75),
        (f"{THOUGHT}", 0.5),
        (f"{THOUGHT[:-8]}#### 72", 0.5),  # reasoning that never ends
        (f"{THOUGHT}<think>again</think>#### 72", 0.0),  # tags that belong to nothing
        (f"{THOUGHT}<tool_call></tool_call>#### 72", 0.0),
        (f"{THOUGHT}<tool_call>calculator(48/2)</tool_call>#### 72", 0.0),
        (f"{THOUGHT}<tool_response>72</tool_response>#### 72", 0.0),
    ],
)
def test_format(text, expected):
    assert score_format(TASK, read_transcript(text)) == expected


def test_a_rollout_that_ends_in_a_call_does_not_end_on_an_answer():
    unfinished = replies(*GOOD.replies[:2])
    assert score_format(TASK, unfinished) == 0.5


@pytest.mark.parametrize(
    ("reasoning", "num_steps"),
    [
        ("She sold some. Then she sold more.", 2),
        ("She sold some.\nShe sold some.\nshe SOLD some!", 1),  # the same line again
        ("42\n43\n44", 0),
        ("48/2 = 24\n48+24 = 72", 2),
        ("so\nthus\nthen", 0),
        (TASK["question"], 0),
        ("Natalia sold 48 clips\nin April and half as many\nin May.\nHow many in all?", 0),  # the same, chopped
        ("How many in all?", 1),  # too short to tell that it was copied
        ("", 0),
    ],
)
def test_steps_are_distinct_and_have_content(reasoning, num_steps):
    assert count_steps(reasoning, question=TASK["question"]) == num_steps


def test_blank_lines_are_read_in_linear_time():
    for question in ("", "How many?"):
        assert list_original_pieces("\n" * 200_000 + "She sold 2.", question=question) == ("She sold 2.",)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("48/2", True), ("3 * (4 + 5)", True), ("2*-3", True), ("10*5", True), ("21*2", True), ("3-0.5", True),
        ("72", False), ("(72)", False), ("-72", False), ("1*72", False), ("72*1", False), ("72/1", False),
        ("72**1", False), ("72+0", False), ("0+72", False), ("72 - 0", False), ("72*1.0", False), ("", False),
        ("1*72+0", False),
    ],
)  # fmt: skip
def test_neutral_operations_do_not_count(expression, expected):
    assert is_operation(expression) is expected


@pytest.mark.parametrize(
    ("calls", "later", "share"),
    [
        ([call("48/2", "24")], "24 clips", 1.0),
        ([call("48/2", "24")], "some clips", 0.0),  # the result is not used
        ([call("72", "72")], "72", 0.0),
        ([call("72*1", "72")], "72", 0.0),
        ([call("48+24", "72"), call("48 + 24", "72")], "72", 0.5),  # the same again
        ([call("48/0", "Error: division by zero")], "48", 0.0),
        ([call("48/2", None)], "24", 0.0),
        ([call("100/3", "33.33333333")], "33.33 dollars", 1.0),
        ([call("48/2", "24"), call("48*2", "96")], "24 or 96", 1.0),
        ([call("48/2", "1e999")], "24 clips", 0.0),
        ([call("48/2", "1e999")], "1e999 clips", 1.0),
        ([call("10**400+4", "1" + "0" * 399 + "4")], "1" + "0" * 399 + "4", 1.0),
    ],
)
def test_useless_calls_do_not_count(calls, later, share):
    transcript = replies(Reply(calls=tuple(calls)), Reply(content=later))
    assert compute_useful_share(transcript) == share


def test_reasoning_needs_steps_and_calculation():
    assert score_reasoning(TASK, read_transcript("#### 72")) == 0.0
    assert score_reasoning(TASK, read_transcript("<think>I know.</think>#### 72")) == 0.25
    assert score_reasoning(TASK, read_transcript("<think>She sold some. Then more of them.</think>#### 72")) == 0.5
    assert score_reasoning(TASK, replies(Reply(calls=(call("48+24", "72"),)), Reply(content="#### 72"))) == 0.0
    filler = (call("1*1", "1"), call("2+0", "2"), call("72", "72"))
    padded = replies(GOOD.replies[0], Reply(calls=filler), *GOOD.replies[1:])
    assert score_reasoning(TASK, padded) == 0.5 + 0.5 * 2 / 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("word " * 299 + "72", 1.0),
        ("word " * 300 + "72", 0.0),
        ("word " * 799 + "72", 0.0),
        ("word " * 800 + "72", -0.5),
        ("7" * 10_000, -0.5),  # one word of absurd length
        ("<think>" + "word " * 900 + "</think>#### 72", -0.5),
        ("", 0.0),
        ("<think>short</think>", 0.0),
    ],
)
def test_conciseness(text, expected):
    assert score_conciseness(TASK, read_transcript(text)) == expected
