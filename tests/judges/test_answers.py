"""Scores that compare the final answer with a reference."""

from __future__ import annotations

import pytest
from transcripts import GOOD, TASK

from tunesmith.judges.answers import (
    build_tolerant_match,
    match_exact,
    match_numeric,
    match_symbolic,
    score_f1,
)
from tunesmith.judges.transcript import read_transcript

within_a_percent = build_tolerant_match(0.01)


def score(match, text, answer):
    return match({"answer": answer}, read_transcript(text))


def test_every_score_accepts_the_right_number():
    for match in (match_numeric, match_symbolic, within_a_percent, match_exact, score_f1):
        assert match(TASK, GOOD) == 1.0
        assert match({"answer": "1,072.5 and so on\n#### 72"}, GOOD) == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("#### 100.9", "100", 1.0),
        ("#### 99.1", "100", 1.0),
        ("#### 101", "100", 0.0),
        ("#### 99", "100", 0.0),
        ("#### -100", "100", 0.0),
        ("#### 0", "0", 1.0),
        ("#### 0.001", "0", 0.0),
        ("#### -100.5", "-100", 1.0),
        ("no number", "100", 0.0),
        ("", "100", 0.0),
        ("\\boxed{2\\sqrt{3}}", "\\sqrt{12}", 1.0),
        ("#### 5", "", None),
        ("\\boxed{5\\%}", "5", 1.0),
        ("\\boxed{5%}", "5", 1.0),
        ("\\boxed{5}", "5\\%", 1.0),
        ("\\boxed{1000\\text{ dollars}}", "1000", 1.0),
        ("\\boxed{\\text{1000}}", "1000", 1.0),
        ("\\boxed{1{,}000}", "1000", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{3\\frac{1}{2}}", "3.5", 1.0),
        ("\\boxed{\\mathbf{72}}", "72", 1.0),
        ("\\boxed{\\frac{1}{3}}", "0.5", 0.0),
        ("\\boxed{500\\%}", "5", 0.0),
        ("\\boxed{500%}", "5", 0.0),
    ],
)
def test_tolerance_is_relative_to_the_reference(text, answer, expected):
    assert score(within_a_percent, text, answer) == expected


def test_math_verify_compares_numbers_too():
    assert score(match_symbolic, "\\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert score(match_symbolic, "#### 41", "42") == 0.0
    assert score(match_symbolic, "nothing", "42") == 0.0
    assert score(match_symbolic, "#### 42", "") is None


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("The answer is: Paris", ["London", "Paris"], 1.0),
        ("\\boxed{an apple}", "apple", 1.0),
        ("<think>Paris</think>London", "Paris", 0.0),
        ("Paris London", "Paris", 0.0),
        ("1,000.0", "1000", 1.0),
        ("\\boxed{5\\%}", "5%", 1.0),
        ("\\boxed{x=5\\%}", "x=5%", 1.0),
        ("\\boxed{x=\\$5}", "x=5", 1.0),
        ("", "Paris", 0.0),
        ("", "$", 0.0),
        ("", ";", 0.0),
        ("the ;", ";", 0.0),
        (";", ";", 1.0),
        ("Paris", [], None),
        ("Paris", "", None),
    ],
)
def test_exact_match_of_words(text, answer, expected):
    assert score(match_exact, text, answer) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("blue whale", "the blue whale", 1.0),
        ("a whale", "blue whale", 2 / 3),  # precision 1, recall 1/2
        ("blue blue blue", "blue whale", 0.4),  # one of three words counts: precision 1/3, recall 1/2
        ("red fox", "blue whale", 0.0),
        ("the whale", ["fox", "blue whale", "whale"], 1.0),
        ("whale", "", None),
    ],
)
def test_f1_of_words(text, answer, expected):
    assert score(score_f1, text, answer) == pytest.approx(expected)


@pytest.mark.parametrize("match", [match_exact, score_f1])
def test_a_number_with_more_digits_than_python_writes_is_compared_as_text(match):
    number = f"{'1' * 4000}e999"
    assert score(match, f"#### {number}", "4") == 0.0
    assert score(match, f"#### {number}", number) == 1.0


@pytest.mark.parametrize("match", [match_numeric, match_symbolic, within_a_percent])
@pytest.mark.parametrize(
    "text",
    [
        "72 72 72 72 71",
        "#### 72\n#### 71",
        "<think>It is 72.</think>",
        "<think>#### 72",
        "<tool_response>72</tool_response>",
        "<tool_response>\n72\n</tool_response> done",
        '<tool_call>{"name": "calculator", "arguments": {"expression": "72"}}</tool_call>',
        '#### 72 <tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>',
    ],
)
def test_only_the_final_answer_of_the_policy_counts(match, text):
    assert match(TASK, read_transcript(text)) == 0.0


@pytest.mark.parametrize("match", [match_numeric, within_a_percent])
def test_a_number_in_a_tool_result_is_not_an_answer(match):
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "48+24"}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "72"},
    ]  # fmt: skip
    assert match(TASK, read_transcript(messages)) == 0.0
    assert match(TASK, read_transcript([*messages, {"role": "assistant", "content": "See the result."}])) == 0.0
