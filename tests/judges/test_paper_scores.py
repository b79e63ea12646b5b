"""The scores of ET-Agent's evaluation code, on variants of answers whose scores that code gave, beside ours."""

from __future__ import annotations

import asyncio

import pytest
from transcripts import replies

from tunesmith.judges.tir import compute_paper_scores, is_equal_text, read_paper_prediction, tir_paper_judge
from tunesmith.judges.transcript import Reply

QUESTIONS = [
    # prediction, accepted answers, em, acc, f1
    ("Barack Hussein Obama", ["Barack Obama", "Obama"], 0, 1, 0.8),
    ("the Eiffel  tower", "Eiffel Tower", 1, 1, 1.0),
    ("Paris.", "Paris", 0, 1, 0.0),
    ("Washington, D.C.", "Washington D.C.", 0, 0, 0.5),
    ("yes sir", "yes", 0, 1, 2 / 3),
    ("Yes", "yes", 1, 1, 1.0),
    ("York", "[New York, Paris]", 0, 0, 2 / 3),
    ("1990", 1990, 1, 1, 1.0),
    ("1,990", "1990", 0, 0, 0.0),
    ("true", [True, False], 1, 1, 1.0),
]
MATH = [
    ("72.0", "72", 0), ("1,000", "1000", 0), ("0.5", "\\frac{1}{2}", 1), ("1/2", "\\frac12", 1), (".5", "0.5", 1),
    ("\\dfrac{3}{4}", "\\frac34", 1), ("x=5", "5", 1), ("xyz=5", "5", 0), ("6-5i", "6 - 5i", 1), ("-5i+6", "6 - 5i", 0),
    ("\\sqrt3", "\\sqrt{3}", 1), ("\\left(1,2\\right)", "(1,2)", 1), ("90", "90^\\circ", 1), ("10", "10\\%", 1),
    ("5\\text{ cm}", "5", 1), ("5\\text{ cm}\\text{ }", "5", 0), ("Evelyn", "\\text{Evelyn}", 0),
    ("\\frac", "\\frac", 1),
    ("1,-2", "12", 0), ("\\frac1", "\\frac{1}{2}", 0), ("03/4", "\\frac{3}{4}", 0), ("-3/4", "\\frac{-3}{4}", 1),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "answer", "em", "acc", "f1"), QUESTIONS)
def test_questions_keep_punctuation_and_have_no_rule_for_yes_and_no(prediction, answer, em, acc, f1):
    scores = compute_paper_scores(prediction, "", answer, is_math=False)
    assert (scores["em"], scores["acc"], scores["f1"]) == (em, acc, pytest.approx(f1))


@pytest.mark.parametrize(("prediction", "answer", "equal"), MATH)
def test_mathematics_is_compared_as_normalized_text(prediction, answer, equal):
    assert compute_paper_scores(prediction, "", answer, is_math=True)["math_equal"] == equal
    assert is_equal_text(answer, answer)


def test_the_first_accepted_answer_of_mathematics_counts_and_a_worked_solution_ends_with_it():
    assert compute_paper_scores("7", "", ["5", "7"], is_math=True)["math_equal"] == 0
    assert compute_paper_scores("7", "", "2 + 5 = 7\n#### 7", is_math=True)["em"] == 1


def test_without_a_prediction_the_last_five_lines_of_the_output_are_compared():
    output = "Paris\na\nb\n\nc\nd\nRome"
    assert compute_paper_scores("", output, "Rome", is_math=False)["acc"] == 1
    assert compute_paper_scores("", output, "Paris", is_math=False)["acc"] == 0
    assert compute_paper_scores("", "", "Paris", is_math=False) == {"em": 0, "acc": 0, "f1": 0, "math_equal": 0}


def judge(prediction, answer, ability):
    response = replies(Reply(content=f"<answer>\\boxed{{{prediction}}}</answer>"))
    output = asyncio.run(tir_paper_judge({"question": "?", "answer": answer, "ability": ability}, response))
    return output.reward, output.metrics


def test_the_suite_has_both_scores_and_rewards_those_of_the_paper():
    reward, metrics = judge("72.0", "72", "math")
    assert reward == 0.0
    assert metrics == {
        "em": 0.0, "math_equal": 1.0, "paper_em": 0.0, "paper_acc": 1.0, "paper_f1": 0.0, "paper_math_equal": 0.0,
    }  # fmt: skip
    reward, metrics = judge("yes sir", "yes", "qa")
    assert reward == pytest.approx(2 / 3)
    assert (metrics["f1"], metrics["paper_f1"], metrics["paper_math_equal"]) == (0.0, pytest.approx(2 / 3), 0.0)


PREDICTIONS = [
    ("<answer>a</answer> <answer>so \\boxed{4}</answer>", "4"), ("<answer>so 4</answer> \\boxed{5}", "so 4"),
    ("\\boxed{3} then \\boxed{\\text{no}}", "no"), ("\\fbox{3}", "\\fbox{3}"), ("<answer></answer>\\boxed{1}", "1"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("\\boxed{\\frac{1}{2", "\\boxed{\\frac{1}{2"),
    ("\\boxed 7", "\\boxed 7"),
    ("the answer is 43, as\ncalculated", ""), ("#### 3\nmore", ""), ("</answer> 3 <answer>", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "prediction"), PREDICTIONS)
def test_the_prediction_is_in_the_last_tags_or_the_last_box(text, prediction):
    assert read_paper_prediction(text) == prediction


def test_without_tags_and_box_a_stated_answer_is_no_prediction():
    task = {"question": "?", "answer": "43", "ability": "qa"}
    output = asyncio.run(tir_paper_judge(task, replies(Reply(content="it is so\nThe answer is 43"))))
    assert output.metrics["f1"] == 1.0
    assert output.metrics["paper_f1"] == pytest.approx(2 / 7)
