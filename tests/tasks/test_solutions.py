"""Worked solutions are split at marked and plain calculations, which are normalized to the calculator's syntax."""

from __future__ import annotations

import pytest

from tunesmith.tasks.solutions import SolutionError, normalize_answer, normalize_expression, parse_solution

CLIPS = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)


def list_parts(text):
    solution = parse_solution(text)
    return list(solution.texts), [(c.expression, c.result, c.is_marked) for c in solution.calculations]


def test_a_text_ends_before_a_result_and_the_next_begins_with_it():
    texts, calculations = list_parts(CLIPS)
    assert texts == [
        "Natalia sold 48/2 =",
        "24 clips in May.\nNatalia sold 48+24 =",
        "72 clips altogether in April and May.",
    ]
    assert calculations == [("48/2", "24", True), ("48+24", "72", True)]
    assert parse_solution(CLIPS).answer == "72"


def test_a_currency_sign_goes_with_the_result():
    texts, _ = list_parts("He pays 5*7=$<<5*7=35>>35 and  2*10 = $<<2*10=20>>20\n#### 55")
    assert texts == ["He pays 5*7=", "$35 and 2*10 =", "$20"]


@pytest.mark.parametrize(
    ("text", "calculations"),
    [
        ("Sam memorized 4+6=10 digits.", [("4+6", "10", False)]),
        ("so $1000-($150+$300+$250) = $300", [("1000-(150+300+250)", "300", False)]),
        ("30,000*.10 = $3,000.00", [("30000*.10", "3000.00", False)]),
        ("3/5 x 100 = 60 and 2/3 \u00d7 75 = 50", [("3/5*100", "60", False), ("2/3*75", "50", False)]),
        ("Day 2:50(2)=100", [("50*2", "100", False)]),
        ("needs 3 / 4 * 2 = 1 1/2 feet", [("3/4*2", "(1+1/2)", False)]),
        ("needs 2 + 1 1/2 = 3 1/2 feet", [("2+(1+1/2)", "(3+1/2)", False)]),
        ("is 20% * 50 = 10 dollars", [("(20/100)*50", "10", False)]),
        ("$40 \u2212 $4 = $36 more", [("40-4", "36", False)]),
        ("S + 143 = 200 - 16 = 184.", [("200-16", "184", False)]),
        ("12 + 24 = 36, so", [("12+24", "36", False)]),
        ("x + 3 = 10", []),
        ("2x + 5*3 = 15", []),
        ("11x=286", []),
        ("p + m = 27 and p = 8m", []),
        ("5*2 = 10 + 3", []),
        ("the 3-4 hours = a long time", []),
        ("1 + 1 = 2p", []),
        ("60% * 50% = 30%", []),
    ],
)
def test_plain_equations_of_numbers_are_calculations(text, calculations):
    assert list_parts(f"{text}\n#### 1")[1] == calculations


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("12 x 2", "12*2"),
        ("$5 \u00d7 3", "5*3"),
        ("1,200 + 3,400.50", "1200+3400.50"),
        ("20%*50", "(20/100)*50"),
        ("7%4", "7%4"),
        ("1 1/2 * 4", "(1+1/2)*4"),
        ("2(3+4)", "2*(3+4)"),
        ("(3+4)2", "(3+4)*2"),
        ("[2+3]*4", "(2+3)*4"),
        ("2^3", "2**3"),
        ("+30+46", "30+46"),
        ("10 \u00f7 4 \u2013 1", "10/4-1"),
        ("50(.5)", "50*.5"),
        ("5*(-3)", "5*(-3)"),
    ],
)
def test_expressions_are_normalized_to_calculator_syntax(written, spelled):
    assert normalize_expression(written) == spelled


@pytest.mark.parametrize(
    ("text", "answer"), [(" 72", "72"), ("1,080", "1080"), ("$5.50", "5.50"), ("-3", "-3"), ("20%", "20"), ("7.", "7")]
)
def test_answers_are_plain_numbers(text, answer):
    assert normalize_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_answer"),
        ("It is 5.", "no_answer"),
        ("#### ", "unreadable_answer"),
        ("#### five", "unreadable_answer"),
        ("#### 3 or 4", "unreadable_answer"),
        ("<<5*7>>35\n#### 35", "unreadable_mark"),
        ("<<=35>>35\n#### 35", "unreadable_mark"),
    ],
)
def test_an_unreadable_solution_has_a_reason(text, reason):
    with pytest.raises(SolutionError) as error:
        parse_solution(text)
    assert error.value.reason == reason


def test_joining_removes_a_calculation_and_keeps_the_text():
    solution = parse_solution(CLIPS).join(0)
    assert solution.texts[0] == "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 ="
    assert [c.expression for c in solution.calculations] == ["48+24"]


def test_a_mark_without_operation_and_an_incomplete_term_are_detected():
    (nothing,) = parse_solution("x = <<26=26>>26\n#### 26").calculations
    assert not nothing.has_operation and nothing.is_balanced
    (negative,) = parse_solution("<<-5+3=-2>>\n#### 2").calculations
    assert negative.has_operation
    (cut,) = parse_solution("2(y+50) 100+120)= 540\n#### 1").calculations
    assert not cut.is_balanced
