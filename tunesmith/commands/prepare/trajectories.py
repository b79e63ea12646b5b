"""Conversion of worked solutions into conversations of the calculator agent.

Each calculation of a solution, or only the last one, becomes an assistant message with reasoning and a tool call,
followed by the tool's result. The last message ends in `#### <answer>`. Stated results are verified with the calculator
before the conversion, and conversations with the judge that scores the agent after it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from tunesmith.chat.parsers import THINK_CLOSE, THINK_OPEN
from tunesmith.commands.prepare.calculator_agent import build_conversation
from tunesmith.judges.answers import match_numeric
from tunesmith.judges.style import score_format
from tunesmith.judges.transcript import build_transcript
from tunesmith.tasks.solutions import ANSWER_MARK, Calculation, Solution, SolutionError
from tunesmith.tools.calculator import CALCULATOR_TOOL, ExpressionError, calculate, compute_expression

Style = Literal["all", "last"]


def check_calculations(solution: Solution) -> Solution:
    """Verify every calculation of a solution with the calculator; return the solution with those that become calls.

    A calculation without an operator, and an unmarked equation that is only part of a term, become plain text again.
    Raises SolutionError with the reason `wrong_calculation` for a marked calculation, `wrong_equation` for an unmarked
    equation, and `no_calculation` if none remains.
    """
    for index in reversed(range(len(solution.calculations))):
        calculation = solution.calculations[index]
        if not calculation.is_marked and not calculation.is_balanced:
            solution = solution.join(index)
            continue
        if not is_confirmed(calculation):
            reason = "wrong_calculation" if calculation.is_marked else "wrong_equation"
            raise SolutionError(reason, f"{calculation.expression} is not {calculation.result}")
        if not calculation.has_operation:
            solution = solution.join(index)
    if not solution.calculations:
        raise SolutionError("no_calculation", "the solution has no calculation")
    return solution


def is_confirmed(calculation: Calculation) -> bool:
    """Whether the calculator's result equals the stated one, up to rounding or truncation at its last decimal."""
    try:
        value, stated = compute_expression(calculation.expression), compute_expression(calculation.result)
    except ExpressionError:
        return False
    num_decimals = len(calculation.result.partition(".")[2])
    return value == stated or (num_decimals > 0 and abs(value - stated) < Fraction(1, 10**num_decimals))


def build_messages(question: str, solution: Solution, *, style: Style) -> list[dict[str, Any]]:
    """The whole conversation of a solution that `check_calculations` returned."""
    while style == "last" and len(solution.calculations) > 1:
        solution = solution.join(0)
    messages = build_conversation(question)
    for number, (text, calculation) in enumerate(zip(solution.texts[:-1], solution.calculations, strict=True), start=1):
        call = {"name": CALCULATOR_TOOL["function"]["name"], "arguments": {"expression": calculation.expression}}
        call_id = f"call_{number}"
        messages += [
            {
                "role": "assistant",
                "content": wrap_reasoning(text or f"{calculation.expression} ="),
                "tool_calls": [{"id": call_id, "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": calculate(calculation.expression)},
        ]
    ending = solution.texts[-1] or solution.answer
    messages.append({"role": "assistant", "content": f"{wrap_reasoning(ending)}\n\n{ANSWER_MARK} {solution.answer}"})
    return messages


def build_plain_messages(question: str, solution: Solution) -> list[dict[str, Any]]:
    """A conversation without tool calls, for a solution whose calculations are not confirmed."""
    while solution.calculations:
        solution = solution.join(0)
    return build_messages(question, solution, style="all")


def wrap_reasoning(text: str) -> str:
    return f"{THINK_OPEN}\n{text}\n{THINK_CLOSE}"


def find_rejection_reason(question: str, messages: list[dict[str, Any]], answer: str) -> str | None:
    """Why the agent's judge gives less than full marks: `invalid_format` or `invalid_answer`; None for full marks."""
    task, transcript = {"question": question, "answer": answer}, build_transcript(messages)
    if match_numeric(task, transcript) != 1.0:
        return "invalid_answer"
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if score_format(task, transcript) < 1.0 or [call.result for call in transcript.calls] != results:
        return "invalid_format"
    return None
