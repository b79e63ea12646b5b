"""Exact match and token F1 of SQuAD, against the script's formulas and values worked by hand."""

from __future__ import annotations

import asyncio
import re
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.judges.composite import squad_judge
from tunesmith.judges.squad import compute_exact_match, compute_token_f1, read_prediction


@pytest.mark.parametrize(
    ("prediction", "accepted", "em", "f1"),
    [
        ("The Eiffel Tower.", ["eiffel  tower"], 1.0, 1.0),
        ("Barack Hussein Obama", ["Barack Obama"], 0.0, 0.8),  # precision 2/3, recall 1
        ("Barack Hussein Obama", ["B. Obama", "Barack Obama", "Obama"], 0.0, 0.8),
        ("Paris", ["London", "paris!"], 1.0, 1.0),
        ("cat cat cat", ["the cat sat"], 0.0, 0.4),  # one of three tokens counts: precision 1/3, recall 1/2
        ("1,000", ["1000"], 1.0, 1.0),
        ("72.0", ["72"], 0.0, 0.0),  # tokens, not numbers
        ("yes", ["yes it is"], 0.0, 0.0),
        ("Yes.", ["yes"], 1.0, 1.0),
        ("no one", ["no"], 0.0, 0.0),
        ("No", ["Yes", "no"], 1.0, 1.0),
        ("A", ["A"], 1.0, 1.0),
        ("A", ["B"], 0.0, 0.0),
        ("", ["A"], 0.0, 0.0),
        ("", ["the"], 0.0, 0.0),
        ("the", ["a"], 0.0, 0.0),
        ("Paris", [], 0.0, 0.0),
        ("M\u00fcnchen", ["m\u00fcnchen"], 1.0, 1.0),
        ("anthem theory", ["them ory"], 0.0, 0.0),  # articles are words, not substrings
    ],
)
def test_values_worked_by_hand(prediction, accepted, em, f1):
    assert compute_exact_match(prediction, accepted) == em
    assert compute_token_f1(prediction, accepted) == pytest.approx(f1)


def normalize_as_the_script(text):
    without_punctuation = "".join(each for each in text.lower() if each not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without_punctuation).split())


def f1_as_the_script(prediction, accepted):
    tokens, expected = normalize_as_the_script(prediction).split(), normalize_as_the_script(accepted).split()
    num_same = sum((Counter(tokens) & Counter(expected)).values())
    if num_same == 0:
        return 0
    precision, recall = 1.0 * num_same / len(tokens), 1.0 * num_same / len(expected)
    return (2 * precision * recall) / (precision + recall)


WORDS = st.lists(st.sampled_from(["The", "a", "blue", "Whale", "whale,", "U.S.", "an", "3.5", "--"]), max_size=6)


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3))
def test_scores_equal_those_of_the_script(prediction, accepted):
    texts = [" ".join(each) for each in (prediction, *accepted)]
    if not all(map(normalize_as_the_script, texts)):
        return  # the script lets empty texts match
    first, *others = texts
    assert compute_token_f1(first, others) == pytest.approx(max(f1_as_the_script(first, each) for each in others))
    assert compute_exact_match(first, others) == max(
        normalize_as_the_script(first) == normalize_as_the_script(each) for each in others
    )


@pytest.mark.parametrize(
    ("text", "prediction"),
    [
        ("<think>x</think><answer>The capital is \\boxed{Paris}</answer>", "Paris"),
        ("<answer>\\[\\boxed{\\text{New York}}\\]</answer>", "New York"),
        ("<answer>London</answer> wait <answer> Paris </answer>", "Paris"),
        ("<answer>London <answer>Paris</answer>", "Paris"),
        ("So it is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("The answer is: Paris", "Paris"),
        ("Paris", "Paris"),
        ("<result>Lyon is \\boxed{Lyon} <answer>Lyon</answer></result> Paris", "Paris"),
        ("<result><answer>Lyon</answer>", ""),
        ("<answer></answer>", ""),
    ],
)
def test_the_prediction_is_the_last_answer_of_the_policy(text, prediction):
    assert read_prediction(text) == prediction


def judge(response, answer):
    output = asyncio.run(squad_judge({"answer": answer}, response))
    return output.reward, output.metrics


def test_the_judge_rewards_f1_and_measures_exact_match():
    assert judge("<answer>Paris</answer>", ["Lutetia", "Paris"]) == (1.0, {"f1": 1.0, "em": 1.0})
    assert judge("<think>Paris</think>Barack Hussein Obama", "Barack Obama") == (
        pytest.approx(0.8),
        {"f1": pytest.approx(0.8), "em": 0.0},
    )
    assert judge("", "Paris") == (0.0, {"f1": 0.0, "em": 0.0})
    assert judge("1912", 1912) == (1.0, {"f1": 1.0, "em": 1.0})


@pytest.mark.parametrize("answer", [None, [], "", [None, " "]])
def test_a_task_without_an_answer_is_not_scored(answer):
    assert judge("Paris", answer) == (None, {})


def test_blank_lines_after_a_statement_are_read_in_linear_time():
    assert read_prediction("The answer is" + "\n" * 300_000) == "The answer is"
    assert read_prediction("The answer is : \n : 7") == ": 7"
