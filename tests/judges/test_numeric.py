"""The numeric judge scores only the response's final answer, in any notation."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.judges import numeric
from tunesmith.judges.numeric import extract_answer, judge_number, read_text, score_numeric, score_symbolic

GSM8K_ANSWER = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72.\n#### 72"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 42.", "42"),
        ("42", "42"),
        ("So 5+3 = 8 apples, then 8-3=5", "5"),
        ("#### 1,234", "1234"),
        ("It costs $5.", "5"),
        ("It costs \\$5", "$5"),
        ("The answer is 12.0", "12"),
        ("#### 5.551115123125783e-17", "0"),
        ("The answer is -3 degrees", "-3"),
        ("The answer is \N{MINUS SIGN}3", "-3"),
        ("The answer is 48/2 = 24 clips in 2 weeks.", "24"),
        ("**Answer:** 18", "18"),
        ("The final answer is: $18$ dollars for 3 eggs.", "18"),
        ("The answer to the question is 7.", "7"),
        ("Answer: \\boxed{7}", "7"),
        ("The answer is 3/4", "0.75"),
        ("that makes 50%", "50"),
        ("1e3", "1000"),
        ("We get 72 clips.", GSM8K_ANSWER),
        ("first #### 5 then #### 72", GSM8K_ANSWER),
        ("\\boxed{\\frac{14}{3}}", "\\frac{14}{3}"),
        ("\\boxed{\\frac{10}{2}}", "5"),
        ("\\boxed{2\\sqrt{3}}", "\\sqrt{12}"),
        ("\\boxed{x+1}", "1+x"),
        ("\\boxed{0.5}", "\\frac{1}{2}"),
        ("0.1", "0.10"),
        ("#### -$5", "-5"),
        ("#### -\\$5", "-5"),
        ("#### \N{EN DASH}5", "-5"),
        ("#### \N{MINUS SIGN}5", "-5"),
        ("It is -5.", "#### \N{MINUS SIGN}$5"),
        ("the answer is -$5", "-5"),
        ("the answer is \N{EN DASH}$1,000.50", "-1000.5"),
        ("He has a balance of -$5.", "-5"),
        ("\\boxed{-$5}", "-5"),
        ("\\boxed{\N{EN DASH}5}", "-5"),
        ("#### 1{,}000", "1000"),
        ("#### 1,\\!000", "1000"),
        ("\\boxed{1\\,000}", "1000"),
        ("the answer is $1{,}234{,}567$.", "1234567"),
        ("#### 1 000 dollars", "1000"),
        ("The answer is 12 000 dollars.", "12000"),
        ("\\boxed{1 000 000}", "1000000"),
        ("\\boxed{0.\\overline{36}}", "\\frac{4}{11}"),
        ("\\boxed{-\\frac{11}{30}}", "-0.3\\overline{6}"),
        ("The answer is $0.\\bar{3}$.", "1/3"),
        ("so it is 0.\\overline{3}", "1/3"),
        ("\\boxed{\\varnothing}", "\\emptyset"),
        ("\\boxed{\\mathrm{even}}", "even"),
        ("#### 3 1/2", "3.5"),
        ("\\boxed{-3 1/2}", "-3.5"),
        ("So 2 1/2 cups", "2.5"),
        ("from $3-$5", "5"),  # ranges and differences
        ("from 3\N{EN DASH}5", "5"),
        ("from $3$\N{EN DASH}$5$", "5"),
        ("from $3 \N{EN DASH}$5", "5"),
        ("10 -$5", "5"),
        ("#### 3\N{EN DASH}5", "3"),
        ("#### 1{,}5", "1"),
        ("The answer is $\\frac{1}{2}$.", "1/2"),  # formulas outside of a box
        ("So the distance is $\\sqrt{52} \\approx 7.2$ miles.", "7.2"),
        ("The length is $2\\sqrt{13} \\approx 7.21$ units.", "7.21"),
        ("The answer is 7.\n2^3 is 8.", "7"),
        ("Answer: 7\n\n\\frac{16}{2} is 8.", "7"),
        ("x = 2^3, y = 7", "7"),
        ("The answer is $18\\text{ cm}^2$.", "18"),
        ("So $\\frac{36}{2} \\Rightarrow 18$.", "18"),
        ("So we need $n \\ge 12$.", "12"),
        ("The final answer is $2\\sqrt{3}$. I hope it is correct.", "\\sqrt{12}"),
        ("The answer is $2^{10}$", "1024"),
        ("The answer is 2^10.", "1024"),
        ("The answer is \\frac{1}{2}.", "0.5"),
        ("The answer is \\(\\frac{3}{4}\\).", "0.75"),
        ("The answer is $x^2+1$.", "1+x^2"),
        ("So we get $-\\frac{1}{2}$", "-1/2"),
        ("The answer is $x = 5$.", "5"),  # and numbers that stand for themselves
        ("The answer is $x$ = 5.", "5"),
        ("The answer is $2^2+1 = 5$.", "5"),
        ("The answer is 5, because $2^2+1=5$", "5"),
        ("The answer is $5 and not $6", "5"),
        ("The answer is $5\\text{ cm}$", "5"),
        ("The answer is 5 m^2", "5"),
        ("The answer is 64 (2^6).", "64"),
        ("The answer is 64 = 2^6.", "64"),
        ("The answer is $3.5 \\times 10^2$.", "350"),
        ("She was the $5^{th}$.", "5"),
        ("The answer is 5^\\text{th}.", "5"),
        ("The answer is $90^\\circ$", "90"),
        ("The answer is \\textbf{42}", "42"),
        ("so \\(x = 2^3 = 8\\)", "8"),
        ("so it is 64 (2^6), as 2^3 is 8", "8"),
        ("#### $\\frac{1}{2}$", "0.5"),
        ("The answer is $(1,000)$.", "1000"),  # tuples, intervals, lists and residues
        ("The answer is $5,\\ \\text{as claimed}$", "5"),
        ("The answer is 5, 3 more.", "5"),
        ("The answer is 5 (3, 4).", "5"),
        ("The answer is $(1,2)$.", "(1, 2)"),
        ("The answer is $6 - 5i$.", "6 - 5i"),
        ("The answer is $(a+5)(b+2)$.", "(a+5)(b+2)"),
        ("So the line is $y = 2x + 3$.", "y = 2x + 3"),
        (
            "The answer is $\\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}$.",
            "\\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}",
        ),
        ("so we get 52_8", "52_8"),
        ("The way is $5 m$ long.", "5"),
        ("The point is $\\left(\\frac{1}{2}, 2\\right)$", "(0.5, 2)"),
        ("so we get (1, 2)", "(1,2)"),
        ("So $(x, y) = (1, 2)$.", "(1,2)"),
        ("#### (1,2)", "(1,2)"),
        ("The answer is $[1,2)$", "[1,2)"),
        ("The answer is $(-\\infty, 3]$", "(-\\infty,3]"),
        ("The answer is $1, 2$", "1,2"),
        ("The answer is $5 \\mod 10^9+7$", "5 \\bmod 10^9 + 7"),
        ("The answer is $5 \\pmod{7}$", "5 (mod 7)"),
        ("The answer is 5 (mod 7)", "5 \\bmod 7"),
        ("\\boxed{x \\equiv 5 \\pmod 7}", "x \\equiv 5 \\pmod{7}"),
    ],
)
def test_right_answers(text, answer):
    assert score_numeric(text, answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "42"),
        ("forty-two", "42"),
        ("1 2 3 4 42 5", "42"),
        ("The answer is 41, 42 or 43", "42"),
        ("The answer is 42. No: the answer is 41.", "42"),
        ("\\boxed{42} \\boxed{41}", "42"),
        ("#### 42\n#### 41", "42"),
        ("421", "42"),
        ("42.5", "42"),
        ("4,2", "42"),
        ("10000001", "10000000"),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{12}"),
        ("no idea", "\\sqrt{12}"),
        ("#### -$5", "5"),
        ("#### \N{EN DASH}5", "5"),
        ("the answer is -$5", "5"),
        ("#### 1{,}000", "1"),
        ("#### 1 000", "1"),
        ("The answer is 12 000 dollars.", "12"),
        ("\\boxed{0}", "0.\\overline{36}"),
        ("\\boxed{0.\\overline{63}}", "0.\\overline{36}"),
        ("\\boxed{0.36}", "0.\\overline{36}"),
        ("The answer is $0.\\bar{3}$.", "0"),
        ("#### 0.\\overline{3}", "0"),
        ("\\boxed{\\textbf{odd}}", "even"),
        ("The answer is 7. So the answer is not 5.", "5"),
        ("#### 3 1/2", "3"),
        ("The answer is $\\frac{1}{2}$.", "1"),
        ("The answer is 7.\n2^3 is 8.", "8"),
        ("The answer is 1.\n\\frac{2}{1} \\frac{3}{1} \\frac{4}{1}", "4"),
        ("So we get $\\frac{1}{2}$.", "2"),
        ("The answer is $2^{10}$", "2"),
        ("The answer is 2^10", "2"),
        ("2^10", "10"),
        ("The answer is $\\sqrt{2}$", "2"),
        ("The answer is $x^2+1$.", "2"),
        ("so it is 2^10", "10"),
        ("#### \\frac{1}{2}", "1"),
        ("The answer is $(1,2)$.", "1"),
        ("The answer is $6 - 5i$.", "6"),
        ("The answer is $2k$.", "2"),
        ("so we get 4343_6", "6"),
        ("The answer is $(1,2)$.", "(1,3)"),
        ("So the point is $(1,2)$.", "2"),
        ("The answer is (1, 2).", "1"),
        ("so we get (1,2)", "2"),
        ("#### (1,2)", "1"),
        ("The answer is $[1,2)$", "1"),
        ("So it is $(-\\infty, 3]$", "3"),
        ("The answer is $(x=1, y=2)$", "2"),
        ("The answer is $1, 2$", "1"),
        ("The answer is $1 \\text{ or } 2$", "1"),
        ("The answer is $5 \\pm 2$", "5"),
        ("The answer is $5 \\mod 10^9+7$", "5"),
        ("The answer is $5 \\mod 10^9+7$", "1000000012"),
        ("The answer is $5 \\pmod{7}$", "5"),
        ("so we get 5 mod 7", "7"),
        ("The answer is 5 (mod 7)", "5"),
        ("\\boxed{5 \\bmod 7}", "7"),
        ("\\boxed{x \\equiv 5 \\pmod 7}", "7"),
        ("\\boxed{5 \\pmod 8}", "5 \\pmod 7"),
        ("\\boxed{5 \\pmod{10+7}}", "5 \\pmod{10}+7"),
        ("The answer is 0", "6.626e-34"),
        ("#### 3e-10", "1.5e-10"),
        ("#### 0.0000000001", "0"),
    ],
)
def test_wrong_answers(text, answer):
    assert score_numeric(text, answer) == 0.0


def test_words_are_not_read_as_a_product_of_letters(monkeypatch):
    monkeypatch.setattr(numeric, "compare_in_time", lambda *terms: pytest.fail("words reached the algebra system"))
    assert score_numeric("The answer is exposition atop Beam Li", "18") == 0.0
    assert score_numeric("\\boxed{x}", "18") == 0.0


@given(st.text(alphabet="0123456789 \n\t\u00a0.,-+/eExy$%]()\u0663", max_size=30))
def test_the_last_number_is_the_last_match(text):
    matches = numeric.NUMBER.findall(text)
    assert numeric._find_last_number(text) == (matches[-1] if matches else None)


@given(st.lists(st.sampled_from(["answer", "Answer", "is", "to", "that", ".", ":", "=", " ", "  ", "\n", "7"])))
def test_statements_are_those_of_a_pattern_without_a_limit(words):
    plain = re.compile(r"\banswer(?:\s+is|\s+to[^.\n]*?\s+is|\s*[:=])+\s*:?", re.IGNORECASE)
    for text in ("".join(words), " ".join(words)):
        assert [each.span() for each in numeric.STATED.finditer(text)] == [each.span() for each in plain.finditer(text)]


@pytest.mark.parametrize("text", ["answer to " * 100_000, "the answer to" + " " * 1_000_000])
def test_statements_that_never_end_are_read_in_linear_time(text):
    assert extract_answer(f"{text}\n5") == "5"


def test_a_reference_without_an_answer_gives_no_score():
    assert score_numeric("The answer is 5.", "") is None
    assert score_numeric("The answer is 5.", "x" * 1000) is None


def test_one_candidate_is_extracted():
    assert extract_answer("He has 3 apples and 4 pears") == "4"
    assert extract_answer("5-3") == "3"
    assert extract_answer("see \\boxed{\\text{a}_{1}}.") == "\\text{a}_{1}"
    assert extract_answer("open \\boxed{5") == "5"
    assert extract_answer("nothing") is None


class Message:
    def get_text_content(self):
        return "The answer is 4."


@pytest.mark.parametrize(
    "response",
    [
        "The answer is 4.",
        Message(),
        {"content": "The answer is 4."},
        {"content": [{"type": "text", "text": "The answer "}, {"type": "text", "text": "is 4."}]},
    ],
)
def test_judge_reads_every_kind_of_response(response):
    output = asyncio.run(judge_number({"question": "2 + 2?", "answer": 4}, response))
    assert output.reward == 1.0
    assert output.metrics == {"accuracy": 1.0}


def test_judge_without_reference_gives_no_reward():
    assert asyncio.run(judge_number({"answer": ""}, "4")).reward is None


def test_response_without_text_is_an_error():
    with pytest.raises(TypeError, match="has no text"):
        read_text(5)


ANAGRAMS = [
    ("east", "seat", 0.0), ("east", "\\text{east}", 1.0), ("\\text{east}", "East", 1.0), ("no", "on", 0.0),
    ("no", "No.", 1.0), ("\\text{west}", "east", 0.0), ("5 apples", "5 papels", 0.0), ("5 apples", "5 apples", 1.0),
    ("2xy", "2yx", 1.0), ("a + b", "b + a", 1.0), ("B", "(B)", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "candidate", "expected"), ANAGRAMS)
def test_words_are_compared_as_written_and_not_as_products_of_letters(reference, candidate, expected):
    """math-verify reads a word as a product of letters."""
    assert score_numeric(f"\\boxed{{{candidate}}}", reference) == expected
    assert score_symbolic(f"\\boxed{{{candidate}}}", reference) == expected
