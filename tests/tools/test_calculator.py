"""The calculator: exact, and harmless on whatever a model writes."""

from __future__ import annotations

import pytest

from tunesmith.tools.calculator import calculate


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
    ],
)
def test_results(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"),
        ("2 +", "cannot read"),
        ("1,234 + 1", "not arithmetic"),
        ("x + 1", "'x' is not arithmetic"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("'a' * 3", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("1 if 2 else 3", "not arithmetic"),
        ("5 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9 ** 9", "exponent is larger"),
        ("9 ** 999", "too large"),
        ("1e400 + 1", "too large"),
        ("1e300", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("2 ^ 3", "only"),
        ("1 + " * 200 + "1", "longer than"),
        ("(" * 120 + "1" + ")" * 120 + "+" + "-" * 60 + "1", "nested deeper|cannot read"),
        ("9" * 400, "too large"),
        ("1\0", "cannot read"),
    ],
)
def test_what_cannot_be_computed_is_an_observation(expression, reason):
    result = calculate(expression)
    assert result.startswith("Error: ")
    assert any(part in result for part in reason.split("|")), result


def test_arguments_that_are_no_text():
    assert calculate(5) == "Error: the expression must be text, not int"
