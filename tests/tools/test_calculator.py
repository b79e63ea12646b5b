"""The calculator is exact, and safe on any input."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.tools.calculator import MAX_CHARACTERS, calculate, compute_expression


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("330 / 6", "55"),
        ("1 / 3", "0.3333333333"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("2 ** 0.5", "1.414213562"),
        ("1_000 * 2", "2000"),
        (" +5 ", "5"),
        ("12345678901 * 10", "123456789010"),
        ("12345678901234567890.5 * 2", "24691357802469135781"),
        ("1,234 + 1", "1235"),
        ("$1,000,000 \u00d7 2", "2000000"),
        ("(1\n+23)", "24"),
        ("(12\r\n + 34,567)", "34579"),
        ("9 \u00f7 2 \u2212 1", "3.5"),
        ("1e3 + 1", "1001"),
        ("1.", "1"),
    ],
)
def test_results(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"),
        ("2 +", "cannot read"),
        ("1,23 + 1", "',' is not arithmetic"),
        ("0x10", "'x10' is not arithmetic"),
        ("12 x 4", "write * for x"),
        ("20% * 5", "write 20% as 20/100"),
        ("3(4)", "'3(4)' is not arithmetic"),
        ("5$3", "cannot read"),
        ("\u096d + 1", "not arithmetic"),
        ("x + 1", "'x' is not arithmetic"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("'a' * 3", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("1 if 2 else 3", "not arithmetic"),
        ("5 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "exponent is larger"),
        ("9 ** 9 ** 9 ** 9", "exponent is larger"),
        ("2 ** 1000 * 2 ** 1000", "too large"),
        ("((((9 ** 99) ** 9) ** 9) ** 9)", "too large"),
        ("1e999999999", "too large"),
        ("1e-400", "too close to zero"),
        ("(1 / 3) ** 400", "too large"),
        ("9 ** 999", "too large"),
        ("1e400 + 1", "too large"),
        ("1e300", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("2 ^ 3", "'^' is not arithmetic"),
        ("1 + " * 200 + "1", "longer than"),
        ("(" * 120 + "1" + ")" * 120 + "+" + "-" * 60 + "1", "nested deeper|cannot read"),
        ("9" * 400, "too large"),
        ("1\0", "not arithmetic"),
        ("1 +\n2", "cannot read"),
        ("a" + ".a" * 249, "'a' is not arithmetic"),
        ("not " * 120 + "1", "'not' is not arithmetic"),
        ("[" * 90 + "]" * 90, "'[' is not arithmetic"),
    ],
)
def test_an_invalid_expression_gives_an_error_sentence(expression, reason):
    result = calculate(expression)
    assert result.startswith("Error: ")
    assert any(part in result for part in reason.split("|")), result


def test_expressions_that_are_not_text():
    assert calculate(5) == "Error: the expression must be text, not int"


@pytest.mark.parametrize(
    "expression", ["a" + ".a" * 249, "1" + "(1)" * 160, "-" * 499 + "1", "(" * 190 + "1" + ")" * 190]
)
def test_results_do_not_depend_on_the_call_stack_depth(expression):
    def descend(levels):
        return calculate(expression) if levels == 0 else descend(levels - 1)

    assert descend(700) == calculate(expression)


def test_errors_are_short_for_long_expressions():
    assert len(calculate("1" + "(1)" * 160)) < 200
    assert len(calculate("(" + "1 + " * 100)) < 200


@given(st.text(alphabet="0123456789.+-*/%()eE_ $,x[", max_size=MAX_CHARACTERS + 20))
def test_any_text_gives_a_number_or_an_error(text):
    result = calculate(text)
    assert result.startswith("Error: ") or math.isfinite(float(result))


@given(st.recursive(
    st.integers(-99, 99).map(lambda n: f"({n})"),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=8,
))  # fmt: skip
def test_results_equal_exact_fractions(text):
    wrapped = "".join(f"Fraction({part})" if part.isdigit() else part for part in split_digits(text))
    try:
        expected = eval(wrapped, {"Fraction": Fraction})
    except ZeroDivisionError:
        assert calculate(text) == "Error: division by zero"
    else:
        assert compute_expression(text) == expected


def split_digits(text):
    parts = [""]
    for character in text:
        if parts[-1] and character.isdigit() == parts[-1][-1].isdigit():
            parts[-1] += character
        else:
            parts.append(character)
    return parts


def test_equal_expressions_have_equal_results():
    expressions = ["1/3", "2 ** 10", "1 / 0", "x + 1", "0.1 + 0.2", "1/3"]
    assert [calculate(each) for each in expressions] == [calculate(each) for each in expressions]
    assert calculate("1/3") == "0.3333333333"
    assert calculate(3) == calculate(3) == "Error: the expression must be text, not int"
