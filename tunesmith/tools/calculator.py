"""A calculator for agents: text in, text out, exact, and safe on whatever a model writes.

The expression is parsed, never evaluated as code. Arithmetic is rational, so 0.1 + 0.2 is 0.3. An expression that is
malformed or asks too much gives one sentence that begins with "Error:", for the model to read.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

MAX_CHARACTERS = 500
MAX_DEPTH = 50
MAX_EXPONENT = 1000
MAX_BITS = 512
"""Of a numerator or a denominator: about 154 digits."""
NUM_SIGNIFICANT_DIGITS = 10

BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class ExpressionError(ValueError):
    """The expression cannot be computed; the message is for whoever wrote it."""


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression (`str`):
            Numbers with + - * / // % ** and parentheses.

    Returns:
        `str`:
            The result, or a sentence that begins with "Error:".
    """
    try:
        return format_number(compute_expression(expression))
    except ExpressionError as error:
        return f"Error: {error}"


def compute_expression(expression: str) -> Fraction:
    """The exact value; a power with a fractional exponent is rounded to a float."""
    if not isinstance(expression, str):
        raise ExpressionError(f"the expression must be text, not {type(expression).__name__}")
    text = expression.strip()
    if not text:
        raise ExpressionError("the expression is empty")
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"cannot read {text!r}; write numbers with + - * / // % ** and parentheses") from error
    return _compute(tree.body, depth=0)


def format_number(value: Fraction) -> str:
    """Whole numbers without a point, others to ten significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{NUM_SIGNIFICANT_DIGITS}g}"
    except OverflowError as error:
        raise ExpressionError("the result is too large") from error


def _compute(node: ast.expr, *, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ExpressionError(f"the expression is nested deeper than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_size(_read_number(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand, depth=depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _compute(operand, depth=depth + 1)
        case ast.BinOp(left=left_node, op=operation, right=right_node):
            left, right = _compute(left_node, depth=depth + 1), _compute(right_node, depth=depth + 1)
            return _check_size(_apply(operation, left, right))
    raise ExpressionError(f"{ast.unparse(node)!r} is not arithmetic on numbers")


def _read_number(number: int | float) -> Fraction:
    try:
        return Fraction(str(number))
    except ValueError as error:
        raise ExpressionError("the number is too large") from error


def _apply(operation: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(operation, ast.Pow):
        return _compute_power(left, right)
    if type(operation) not in BINARY:
        raise ExpressionError("only + - * / // % ** are known")
    try:
        return BINARY[type(operation)](left, right)
    except ZeroDivisionError as error:
        raise ExpressionError("division by zero") from error


def _compute_power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(exponent) > MAX_EXPONENT:
        raise ExpressionError(f"the exponent is larger than {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ExpressionError("division by zero")
    if exponent.denominator == 1:
        largest = max(abs(base.numerator), base.denominator)
        if largest > 1 and largest.bit_length() * abs(exponent) > 2 * MAX_BITS:
            raise ExpressionError("the result is too large")
        return base**exponent.numerator
    if base < 0:
        raise ExpressionError("a fractional power of a negative number is not a real number")
    try:
        return Fraction(str(float(base) ** float(exponent)))
    except (OverflowError, ValueError) as error:
        raise ExpressionError("the result is too large") from error


def _check_size(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > MAX_BITS:
        raise ExpressionError("the number is too large or too long")
    return value
