"""A calculator tool: text in, text out, exact, and safe on any input.

The expression is parsed, never evaluated as code. Arithmetic is rational, so 0.1 + 0.2 is 0.3. Length, nesting,
exponents and digits are bounded, which bounds the run time. For a malformed or too large expression the result is one
sentence that begins with "Error:", for the model to read.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from tunesmith.errors import shorten
from tunesmith.tools.tool import Tool, ToolInputError

MAX_CHARACTERS = 500
MAX_DEPTH = 50
MAX_EXPONENT = 1000
MAX_BITS = 512
"""Largest size of a numerator or a denominator: about 154 digits."""
NUM_SIGNIFICANT_DIGITS = 10
MAX_SHOWN_CHARACTERS = 60
"""Longest expression that an error message quotes."""

SYNTAX = "write numbers with + - * / // % ** and parentheses"
SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "$": " "})
"""Typographic operators -> ASCII; currency signs are blank, so that they join no digits."""
GROUPED_DIGITS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
FOREIGN = re.compile(r"[^\W\d_]\w*|[^\d.+\-*/%()\s_]", re.ASCII)
"""A word or a sign that is not part of an arithmetic expression."""
EXPONENT = re.compile(r"(?<=[\d.])[eE](?=[-+]?\d)")
BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class ExpressionError(ToolInputError):
    """The expression cannot be computed; the message states the reason."""


def build_calculator_tool() -> Tool:
    """The `Tool` of an environment."""

    async def run(expression: str) -> str:
        return format_number(compute_expression(expression))

    expression = {"type": "string", "description": "Numbers with + - * / // % ** and parentheses."}
    return Tool(
        name="calculator",
        description="Compute an arithmetic expression exactly.",
        parameters={"type": "object", "properties": {"expression": expression}, "required": ["expression"]},
        text_argument="expression",
        run=run,
    )


CALCULATOR_TOOL: Mapping[str, Any] = build_calculator_tool().schema
"""The tool schema for chat requests."""


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
    text = GROUPED_DIGITS.sub(lambda found: found.group().replace(",", ""), text.translate(SIGNS)).strip()
    _check_words(text)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        hint = "; write 20% as 20/100" if "%" in text else ""
        raise ExpressionError(f"cannot read {shorten(text, MAX_SHOWN_CHARACTERS)!r}; {SYNTAX}{hint}") from error
    return _compute(tree.body, text, depth=0)


def format_number(value: Fraction) -> str:
    """Whole numbers without a decimal point, others with ten significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{NUM_SIGNIFICANT_DIGITS}g}"
    except OverflowError as error:
        raise ExpressionError("the result is too large") from error


def _check_words(text: str) -> None:
    """Refuse names, calls, strings, lists, commas: only arithmetic reaches the Python parser."""
    found = FOREIGN.search(EXPONENT.sub("0", text))
    if found is not None:
        hint = "; write * for x" if found.group() in "xX" else ""
        shown = shorten(found.group(), MAX_SHOWN_CHARACTERS)
        raise ExpressionError(f"{shown!r} is not arithmetic on numbers; {SYNTAX}{hint}")


def _compute(node: ast.expr, text: str, *, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ExpressionError(f"the expression is nested deeper than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float()):
            return _check_size(_read_number(_quote(node, text)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand, text, depth=depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _compute(operand, text, depth=depth + 1)
        case ast.BinOp(left=left_node, op=operation, right=right_node):
            left, right = _compute(left_node, text, depth=depth + 1), _compute(right_node, text, depth=depth + 1)
            return _check_size(_apply(operation, left, right))
    shown = shorten(_quote(node, text), MAX_SHOWN_CHARACTERS)
    raise ExpressionError(f"{shown!r} is not arithmetic on numbers; {SYNTAX}")


def _quote(node: ast.expr, text: str) -> str:
    """The source of a node, which may be on any line."""
    return ast.get_source_segment(text, node) or ""


def _read_number(literal: str) -> Fraction:
    """Parse a literal: digits exactly, scientific notation through a float, which bounds the exponent."""
    try:
        if not re.search("[eE]", literal):
            return Fraction(literal.replace("_", "").rstrip("."))
        value = Fraction(str(float(literal)))
    except ValueError as error:
        raise ExpressionError("the number is too large") from error
    if value == 0 and re.search("[1-9]", re.split("[eE]", literal)[0]):
        raise ExpressionError("the number is too close to zero")
    return value


def _apply(operation: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(operation, ast.Pow):
        return _compute_power(left, right)
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
