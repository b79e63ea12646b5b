"""Conversion of solutions into conversations in which the calculator confirms every call."""

from __future__ import annotations

import asyncio

import pytest

from tunesmith.commands.prepare.calculator_agent import SYSTEM_PROMPT
from tunesmith.commands.prepare.rows import (
    RowCandidate,
    build_messages,
    check_calculations,
    find_rejection_reason,
    is_confirmed,
)
from tunesmith.judges.composite import gsm8k_judge
from tunesmith.tasks.solutions import Calculation, SolutionError, parse_solution

QUESTION = "How many clips?"
SOLUTION = """x is <<48=48>>48 clips in April.
In May she sold 48/2 = <<48/2=24>>24 clips.
That is 48 + 24 = 72 clips.
#### 72"""


def call(number, expression):
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return [{"id": f"call_{number}", "type": "function", "function": function}]


def test_every_calculation_is_a_call_with_its_result():
    messages = build_messages(QUESTION, check_calculations(parse_solution(SOLUTION)), style="all")
    assert messages == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "<think>\nx is 48 clips in April.\nIn May she sold 48/2 =\n</think>",
            "tool_calls": call(1, "48/2"),
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "24"},
        {
            "role": "assistant",
            "content": "<think>\n24 clips.\nThat is 48 + 24 =\n</think>",
            "tool_calls": call(2, "48+24"),
        },
        {"role": "tool", "tool_call_id": "call_2", "content": "72"},
        {"role": "assistant", "content": "<think>\n72 clips.\n</think>\n\n#### 72"},
    ]
    assert find_rejection_reason(QUESTION, messages, "72") is None


def test_style_last_calls_only_the_last_calculation():
    messages = build_messages(QUESTION, check_calculations(parse_solution(SOLUTION)), style="last")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_calls"] == call(1, "48+24")
    assert "48/2 = 24 clips." in messages[2]["content"]


@pytest.mark.parametrize("style", ["all", "last"])
def test_demonstrations_get_full_reward(style):
    messages = build_messages(QUESTION, check_calculations(parse_solution(SOLUTION)), style=style)
    verdict = asyncio.run(gsm8k_judge({"question": QUESTION, "answer": "72"}, {"messages": messages}))
    assert verdict.reward == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("5*7=<<5*7=36>>36\n#### 36", "wrong_calculation"),
        ("<<12=13>>13 + 1 = 14\n#### 14", "wrong_calculation"),
        ("5*seven=<<5*seven=35>>35\n#### 35", "wrong_calculation"),
        ("<<10/3=3>>3\n#### 3", "wrong_calculation"),
        ("5*7 = 36, so\n#### 36", "wrong_equation"),
        ("11x=286 so x=<<26=26>>26\n#### 26", "no_calculation"),
        ("I just know.\n#### 26", "no_calculation"),
    ],
)
def test_unconfirmed_solutions_are_refused(solution, reason):
    with pytest.raises(SolutionError) as error:
        check_calculations(parse_solution(solution))
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("expression", "result", "verdict"),
    [
        ("10/4", "2.5", True),
        ("100/3", "33.33", True),
        ("200/3", "66.67", True),
        ("200/3", "66.66", True),  # truncated instead of rounded
        ("200/3", "66.65", False),
        ("200/3", "67", False),
        ("2*3", "6.00", True),
        ("2*3", "6.01", False),
        ("1/2", ".5", True),
        ("3/2", "(1+1/2)", True),
        ("1/0", "0", False),
        ("2*3", "six", False),
    ],
)
def test_results_may_be_rounded_or_truncated_at_their_last_decimal(expression, result, verdict):
    assert is_confirmed(Calculation(expression=expression, result=result, is_marked=True)) is verdict


def test_a_calculation_without_text_still_has_reasoning():
    messages = build_messages(QUESTION, check_calculations(parse_solution("<<2*3=6>>\n#### 6")), style="all")
    assert [m["content"] for m in messages[2:]] == ["<think>\n2*3 =\n</think>", "6", "<think>\n6\n</think>\n\n#### 6"]


def test_an_unconfirmed_solution_has_no_calls():
    solution = parse_solution("He has 5*7=<<5*7=36>>36 apples.\n#### 36")
    candidate = RowCandidate(index=0, question=QUESTION, text="", solution=solution, is_verified=False)
    messages = candidate.build_messages("all")
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[-1]["content"] == "<think>\nHe has 5*7= 36 apples.\n</think>\n\n#### 36"


def test_conversations_are_rejected_for_a_wrong_answer_or_format():
    messages = build_messages(QUESTION, check_calculations(parse_solution(SOLUTION)), style="all")
    assert find_rejection_reason(QUESTION, messages, "71") == "invalid_answer"
    assert find_rejection_reason(QUESTION, [*messages[:-1], {"role": "assistant", "content": "#### 72"}], "72") is None
    silent = [
        {**m, "content": "<think></think>#### 72" if m["role"] == "assistant" else m["content"]} for m in messages
    ]
    assert find_rejection_reason(QUESTION, silent, "72") == "invalid_format"
    unanswered = [message for message in messages if message.get("tool_call_id") != "call_1"]
    assert find_rejection_reason(QUESTION, unanswered, "72") == "invalid_format"
