"""Compare closed expressions with math-verify; run as a program, it answers requests of `ExpressionProcess`.

A request is one line of JSON, `[candidate, reference]`, and so is the answer. The program imports nothing of tunesmith,
so that it starts alone. math-verify limits its own time by a signal, which only the main thread of a process receives.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

from math_verify import parse, verify

MAX_EXPRESSION_CHARACTERS = 200
"""Longer expressions are not passed to math-verify."""
TIMEOUT_S = 2
MAX_CPU_S = 60
"""CPU seconds of one request after which the program is killed, also where Python handles no signal, such as in one
multiplication of large integers. Otherwise its owner kills it earlier; an owner that was killed cannot."""


def compare_expressions(candidate: str | None, reference: str) -> bool | None:
    """Whether two expressions are equal; None if the reference cannot be read, in or out of time.

    Call it in the main thread of a process only.
    """
    assert threading.current_thread() is threading.main_thread()
    reference_terms = _parse_expression(reference)
    if not reference_terms:
        return None
    terms = [] if candidate is None else _parse_expression(candidate)
    return bool(terms) and bool(verify(reference_terms, terms, timeout_seconds=TIMEOUT_S))


def _parse_expression(text: str) -> list[Any]:
    """Expressions that math-verify parses from `text`; empty if it is too long."""
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        return []
    terms: list[Any] = parse(f"${text}$", parsing_timeout=TIMEOUT_S)
    return terms


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    for line in sys.stdin:
        candidate, reference = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        print(json.dumps(compare_expressions(candidate, reference)), file=answers, flush=True)


if __name__ == "__main__":
    main()
