"""Text with tags becomes a transcript."""

from __future__ import annotations

import pytest

from tunesmith.environments.transcript import find_format_error
from tunesmith.et_agent.formats.convert import find_failure, parse_trajectory

STEP = "<think>t</think><search>q</search> <result>\ndocs\n</result>\n"
END = "<think>u</think><answer>\\boxed{1}</answer>"


def describe(text):
    return [(each.kind, each.text) for each in parse_trajectory("q", text).segments]


def test_the_texts_of_the_segments_are_the_text():
    text = "Let me see. " + STEP + "<think>x</think>\n<python>\na = 1\nprint(a)\n</python><result>1</result>" + END
    transcript = parse_trajectory("How?", text + "\n")
    assert transcript.text == text and transcript.question == "How?"
    kinds = [each.kind for each in transcript.segments]
    assert kinds == ["thought", "call", "result", "thought", "call", "result", "thought", "answer"]
    search, python = [each for each in transcript.segments if each.kind == "call"]
    assert search.arguments == {"query": "q"} and python.arguments == {"code": "a = 1\nprint(a)"}
    assert [result.result for _, result in transcript.pairs] == ["docs", "1"]
    assert transcript.segments[2].text == " <result>\ndocs\n</result>"
    assert transcript.finish == "answered" and find_format_error(parse_trajectory("q", STEP + END)) is None


def test_results_that_the_model_wrote_are_its_text():
    text = "<think>t</think><result>made up</result>" + END
    assert describe(text) == [("thought", text[: text.index("<answer>")]), ("answer", "<answer>\\boxed{1}</answer>")]
    assert find_format_error(parse_trajectory("q", text)) is not None


@pytest.mark.parametrize("answer", ["\\boxed{1", "\\boxed{\\text{1}", "\\boxed{}", "\\boxed{\\text{}}", "1"])
def test_an_answer_needs_a_box_that_is_closed_and_not_empty(answer):
    error = find_format_error(parse_trajectory("q", f"<think>t</think><answer>{answer}</answer>"))
    assert error == "the answer has no \\boxed{}"


def test_a_call_without_result_is_text_unless_it_ends_the_trajectory():
    assert [kind for kind, _ in describe("<search>a</search> and then " + END)] == ["thought", "answer"]
    open_ended = parse_trajectory("q", "<think>t</think><search>a</search>")
    assert [each.kind for each in open_ended.segments] == ["thought", "call"] and open_ended.finish == "no_answer"
    assert len(open_ended.open_calls) == 1


def test_calls_in_thoughts_and_answers_inside_the_text_are_no_answer():
    assert describe("<answer>1</answer> hm") == [("thought", "<answer>1</answer> hm")]
    assert describe("") == []


def test_an_empty_call_has_no_arguments():
    call = parse_trajectory("q", "<search> </search><result></result>" + END).segments[0]
    assert call.arguments is None


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        ("67", ""),
        ("a history of spelling errors and error correction", ""),
        ("", "error"),
        (
            "Traceback (most recent call last):\n  File \"<string>\", line 1\nNameError: name 'x' is not defined",
            "error",
        ),
        ("  File \"<string>\", line 1\n    (\n    ^\nSyntaxError: '(' was never closed", "error"),
        ("Execution Timeout", "timeout"),
        ("Execution timeout (timeout is 30 seconds)", "timeout"),
        ("Local search failed: q", "error"),
        ("invalid query", "error"),
        ("Error: Tool(python) execution failed", "error"),
        ("Tool(python) returned empty output.", "error"),
    ],
)
def test_failures_are_recognized_by_the_messages_of_the_tools(result, failure):
    assert find_failure(result) == failure
    transcript = parse_trajectory("q", f"<python>x</python><result>{result}</result>")
    assert transcript.failed_calls == bool(failure)
