"""The program of `ExpressionProcess`: compares closed expressions with math-verify.

It speaks JSON-RPC (`tunesmith.json_rpc`): the method `compare` has the parameters `candidate` and `reference`, and the
result true, false, null if the reference cannot be read, or "late". The program imports nothing of tunesmith, so that
it starts alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from math_verify import parse, verify

MAX_EXPRESSION_CHARACTERS = 200
"""Longer expressions are not passed to math-verify."""
MAX_DIGITS = 1_000_000
"""Nor are powers and factorials of numbers with more digits: math-verify would compute them."""
TIMEOUT_S = 6
"""Limit of one request, between operations of Python."""
MAX_CPU_S = 60
"""CPU seconds of one request after which the program is killed, also where Python handles no signal, such as in one
multiplication of large integers. Otherwise its owner kills it earlier; an owner that was killed cannot."""
PRODUCT = r"\d+(?:\s*(?:\\cdot|\\times|\*(?!\*))\s*\d+)*"
POWERS = re.compile(
    r"(?:[({]\s*-?\s*(\d+)\s*[)}]|(\d+))"
    rf"[\s{{(]*(?:\^|\*\*)[\s{{(]*[-+]?\s*({PRODUCT}(?:[\s{{(]*(?:\^|\*\*)[\s{{(]*{PRODUCT})*)"
)
"""A number, also one in brackets, and its exponent: a tower of numbers and products of them."""
BASE = re.compile(r"\s*[0-9A-Za-z]+_\{?(\d+)\}?\s*")
DOLLAR = re.compile(r"(?<!\\)\$")
FACTORIAL = re.compile(r"(\d+)\s*[)}]?\s*!")
TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")
REPEATING = re.compile(r"(\d+)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
"""A decimal whose last digits repeat; math-verify reads `0.\\overline{36}` as 0."""
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
SOLVED_FOR = re.compile(r"^\s*[A-Za-z]\s*=")
CHOICE = re.compile(r"\W*[A-Za-z]\W*")
MODULO = re.compile(r"\\?[bp]?mod(?![a-z])|\\equiv(?![a-z])")
WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z\s]+")


class OutOfTime(BaseException):
    """Not an Exception, which math-verify and sympy catch."""


def compare_expressions(candidate: str | None, reference: str) -> bool | None:
    """Whether two expressions are equal; None if the reference cannot be read."""
    reference_terms = _parse_expression(reference)
    if not reference_terms:
        return None
    bases = [BASE.fullmatch(DOLLAR.sub("", text)) for text in (candidate or "", reference)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return False  # numerals of different bases, whose subscripts math-verify does not read
    texts = [TEXT.sub(r" \1 ", text).strip(" .") for text in (candidate or "", reference)]
    # math-verify reads a word as a product of its letters, so that an anagram would be equal
    if WORDS.fullmatch(texts[1]):
        return texts[0].casefold().split() == texts[1].casefold().split()
    if any(MODULO.search(text) for text in texts):  # math-verify reads some as their modulus
        return _write_residue(texts[0]) == _write_residue(texts[1])
    # math-verify ignores case; choices like (B) may differ in it, variables and units may not
    letters = [sorted(VARIABLE.findall(SOLVED_FOR.sub("", text))) for text in texts]
    if letters[0] != letters[1] and sorted("".join(letters[0]).casefold()) == sorted("".join(letters[1]).casefold()):
        return CHOICE.fullmatch(texts[1]) is not None
    words = [sorted(WORD.findall(text)) for text in texts]
    if words[0] != words[1] and sorted("".join(words[0])) == sorted("".join(words[1])):
        return False
    terms = [] if candidate is None else _parse_expression(candidate)
    return bool(terms) and bool(verify(reference_terms, terms, timeout_seconds=None))


def _write_residue(text: str) -> str:
    r"""A residue as written, but for spaces and the notations `\\pmod{7}`, `(\\bmod 7)` and `mod 7` of its modulus."""
    plain = re.sub(r"\{(\w+)\}", r"\1", "".join(re.sub(r"\\?[bp]?mod(?![a-z])", "mod", DOLLAR.sub("", text)).split()))
    return re.sub(r"\((mod\w+)\)", r"\1", plain)


def write_fraction(repeating: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction, `0.1\overline{6}` as 15/90."""
    whole, fixed, repeated = repeating.groups()
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def is_too_large(text: str) -> bool:
    """Whether a power or factorial of numbers in `text` has more than `MAX_DIGITS` digits."""
    if any(math.lgamma(float(each) + 1) > MAX_DIGITS * math.log(10) for each in FACTORIAL.findall(text)):
        return True
    for bracketed, plain, tower in POWERS.findall(text):
        products = [bracketed or plain, *re.split(r"\^|\*\*", tower)]
        exponent = 1.0
        for product in reversed(products):
            *factors, base = map(float, re.findall(r"\d+", product))
            if base > 1 and exponent * math.log10(base) > MAX_DIGITS:
                return True
            power = math.exp(min(exponent * math.log(base), 700.0)) if base > 1 else base
            exponent = math.prod(factors) * power
    return False


def _parse_expression(text: str) -> list[Any]:
    """Expressions that math-verify parses from `text`; empty if it is too long or its numbers are too large."""
    text = DOLLAR.sub("", text)  # of the parts of a list, each in dollar signs, math-verify would read the last
    if len(text) > MAX_EXPRESSION_CHARACTERS or is_too_large(text):
        return []
    text = REPEATING.sub(write_fraction, text).replace("\\varnothing", "\\emptyset")
    terms: list[Any] = parse(f"${text}$", parsing_timeout=None)
    return terms


def main() -> None:
    def stop(number: int, frame: Any) -> None:
        raise OutOfTime

    answers = sys.stdout
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - what libraries print is no answer
    signal.signal(signal.SIGALRM, stop)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:  # the owner no longer waits for an answer
            continue
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer: bool | str | None
        try:
            signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
            answer = compare_expressions(**request["params"])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except OutOfTime:
            answer = "late"
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
