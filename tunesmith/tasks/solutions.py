"""Parse worked solutions in GSM8K format into texts and calculations.

In: `Natalia sold 48/2 = <<48/2=24>>24 clips in May. ...\\n#### 72`. Out: the texts around the calculations, the
calculations, and the final answer as a plain number. Marked calculations are those between `<<` and `>>`; plain ones
are equations in the text without marks. Expressions are normalized to the calculator's syntax; whether they are correct
is not checked here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate

ANSWER_MARK = "####"
NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
MARKED = re.compile(r"<<(.*?)>>", re.DOTALL)
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\s+\d+/\d+|\d+(?:\.\d+)?|\.\d+)"
OPERAND = rf"[($]*\s*\$?{DIGITS}%?\)*"
OPERATOR = r"\s*[-+*/xX\u00d7\u00f7\u2212\u2013]\s*"
PLAIN = re.compile(
    rf"(?<![\w.,%)])(?P<expression>{OPERAND}(?:(?:{OPERATOR}|(?=\()){OPERAND})+)\s*=\s*"
    rf"(?P<result>\$?-?(?:\d+\s+\d+/\d+|(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+))"
    rf"(?![\w%(]|[.,]\d|{OPERATOR}[\d$(.])"
)
"""An equation of numbers; a number directly before a parenthesis is a factor."""
INSIDE_TERM = re.compile(rf"[\w%)]{OPERATOR}\Z|\d\s+\Z")
"""Text before a plain equation whose first operand is only the end of a longer term."""
CURRENCIES = "$\u20ac\u00a3"
REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[$\u20ac\u00a3]"), ""),
    (re.compile(r"(?<=\d),(?=\d{3})"), ""),
    (re.compile(r"\u00d7|(?<=[\d)%\s.])[xX](?=[\d(\s.])"), "*"),
    (re.compile(r"\u00f7"), "/"),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\^"), "**"),
    (re.compile(r"\["), "("),
    (re.compile(r"\]"), ")"),
    (re.compile(r"(\d+)\s+(\d+/\d+)"), r"(\1+\2)"),
    (re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*%(?!\s*[\d(])"), r"(\1/100)"),
    (re.compile(r"(?<=[\d)])\s*\("), "*("),
    (re.compile(r"\)\s*(?=\d)"), ")*"),
    (re.compile(r"(?<=\D)\s+|\s+(?=\D)|^\+"), ""),
    (re.compile(r"\((\d*\.?\d+)\)"), r"\1"),
)
"""Written notation -> calculator syntax, applied in this order."""


class SolutionError(ValueError):
    """A solution that cannot be parsed; `reason` is the name under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculation:
    """One calculation in the calculator's syntax."""

    expression: str
    result: str
    """The result as stated in the solution."""
    is_marked: bool

    @property
    def has_operation(self) -> bool:
        """False if nothing is computed, as in `<<12=12>>`."""
        return re.search(r"[\d.)][-+*/]", self.expression) is not None

    @property
    def is_balanced(self) -> bool:
        """Whether parentheses match; False if a plain equation was cut out of the middle of a term."""
        depths = list(accumulate((c == "(") - (c == ")") for c in self.expression))
        return min(depths) >= 0 and depths[-1] == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solution split at its calculations: text 0, calculation 0, text 1, ..., last text."""

    texts: tuple[str, ...]
    """One more than calculations; a text begins with the result of the calculation before it."""
    calculations: tuple[Calculation, ...]
    answer: str
    """A plain number, without commas and currency."""

    def __post_init__(self) -> None:
        assert len(self.texts) == len(self.calculations) + 1

    def join(self, index: int) -> Solution:
        """The solution with calculation `index` removed and the texts around it joined."""
        before, after = self.texts[:index], self.texts[index + 2 :]
        joined = f"{self.texts[index]} {self.texts[index + 1]}"
        rest = self.calculations[:index] + self.calculations[index + 1 :]
        return replace(self, texts=(*before, joined, *after), calculations=rest)


def parse_solution(text: str) -> Solution:
    """Parse a solution; raises SolutionError with reason `no_answer`, `unreadable_answer` or `unreadable_mark`."""
    body, mark, ending = text.rpartition(ANSWER_MARK)
    if not mark:
        raise SolutionError("no_answer", f"the solution has no {ANSWER_MARK}")
    texts, calculations = [""], list[Calculation]()
    for index, piece in enumerate(MARKED.split(body)):
        if index % 2 == 0:
            plain_texts, plain = _split_plain(piece)
            texts[-1] += plain_texts[0]
            texts += plain_texts[1:]
            calculations += plain
        else:
            calculations.append(_parse_mark(piece))
            texts.append("")
    return Solution(texts=_clean(texts), calculations=tuple(calculations), answer=normalize_answer(ending))


def normalize_answer(text: str) -> str:
    """A final answer as a plain number: no commas, currency, percent sign or full stop."""
    bare = re.sub(rf"[,{CURRENCIES}%\s]", "", text.replace("\u2212", "-")).rstrip(".")
    if not NUMBER.fullmatch(bare):
        raise SolutionError("unreadable_answer", f"{text.strip()[:40]!r} is not a number")
    return bare


def normalize_expression(text: str) -> str:
    text = text.strip()
    for pattern, replacement in REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text


def _parse_mark(inside: str) -> Calculation:
    expression, equals, result = inside.rpartition("=")
    expression = expression.partition("=")[0]  # `<<5*2=10=10>>` states its result twice
    if not equals or not expression.strip() or not result.strip():
        raise SolutionError("unreadable_mark", f"<<{inside[:40]}>> is not of the form <<expression=result>>")
    return Calculation(expression=normalize_expression(expression), result=normalize_expression(result), is_marked=True)


def _split_plain(text: str) -> tuple[list[str], list[Calculation]]:
    texts, calculations, start = [], [], 0
    for found in PLAIN.finditer(text):
        if INSIDE_TERM.search(text[: found.start()]):
            continue
        texts.append(text[start : found.start("result")])
        start = found.start("result")
        expression, result = normalize_expression(found["expression"]), normalize_expression(found["result"])
        calculations.append(Calculation(expression=expression, result=result, is_marked=False))
    return [*texts, text[start:]], calculations


def _clean(texts: list[str]) -> tuple[str, ...]:
    """Collapse spaces and empty lines, and move a currency sign before a result to the text that begins with it."""
    cleaned, currency = [], ""
    for text in texts:
        lines = (" ".join(line.split()) for line in (currency + text).split("\n"))
        joined = "\n".join(line for line in lines if line)
        bare = joined.rstrip(CURRENCIES)
        currency = joined[len(bare) :]
        cleaned.append(bare.rstrip())
    cleaned[-1] += currency
    return tuple(cleaned)
