r"""Compare numbers and closed expressions with a reference answer.

One candidate is extracted from a response: its last `\boxed{}`, else the text after its last `####`, else after its
last "answer is", else its last number. Writing many numbers therefore gains nothing. Plain numbers are compared
exactly; other expressions are compared by math-verify. A reference without an answer gives None (no score).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from tunesmith.errors import RolloutError, ToolUnavailableError
from tunesmith.json_rpc import ServerProcess, SharedServer
from tunesmith.types import JudgeOutput

START_TIMEOUT_S = 120.0
"""Generous, because sympy is imported at the start."""
ANSWER_TIMEOUT_S = 10.0
"""The process ends a comparison itself after `TIMEOUT_S` of its own, unless a single operation takes longer."""
PROGRAM = Path(__file__).with_name("expressions.py")
NUM_TRIES = 2
PLAIN = "1"
"""What a reference is compared with to know whether a comparison was late because of it."""
LABEL = "the process that compares expressions"


def start_comparing() -> ServerProcess:
    """A process that is ready to compare; ToolUnavailableError if it does not start, TimeoutError not in time."""
    server = ServerProcess([sys.executable, "-P", str(PROGRAM)], label=LABEL)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        server.call("compare", {"candidate": PLAIN, "reference": PLAIN}, timeout_s=START_TIMEOUT_S)
        stack.pop_all()
    return server


class ExpressionProcess:
    """A process that compares expressions, for all threads.

    math-verify computes what it reads: one power of large integers can take hours, and no signal interrupts it. So a
    process compares; it starts with the first comparison, and is killed and replaced if it does not answer.
    """

    def __init__(self) -> None:
        self.forget()

    def compare(self, candidate: str | None, reference: str) -> bool | None:
        """Whether two expressions are equal; None if the reference cannot be read.

        A candidate that is not compared in time is wrong, if a plain number is. Otherwise this raises RolloutError: the
        reference takes that long, which says nothing about the candidate.
        """
        asked = {"candidate": candidate, "reference": reference}
        for _ in range(NUM_TRIES):
            # one at a time: the time limit is that of a comparison, not of those before it
            with self._lock:
                try:
                    answer: bool | str | None = self._shared.get().call("compare", asked, timeout_s=ANSWER_TIMEOUT_S)
                except ToolUnavailableError:  # it did not start, was killed from outside, or ran out of memory
                    self._shared.close()
                    continue
                except TimeoutError:
                    self._shared.close()
                    answer = "late"
            if answer == "late" and candidate != PLAIN:
                return None if self.compare(PLAIN, reference) is None else False
            if answer == "late":
                raise RolloutError(f"math-verify did not compare the reference {reference!r} with a number in time")
            return None if answer is None else bool(answer)
        raise RolloutError(f"{LABEL} was lost {NUM_TRIES} times in one comparison")

    def close(self) -> None:
        """End the process; the next comparison starts another."""
        with self._lock:
            self._shared.close()

    def forget(self) -> None:
        """In a forked copy of this process: the comparing process is not its own, and a thread may hold the lock."""
        self._lock, self._shared = threading.Lock(), SharedServer(start_comparing)


_process = ExpressionProcess()
os.register_at_fork(after_in_child=_process.forget)
compare_in_time = functools.lru_cache(maxsize=1)(_process.compare)  # parts of a judge ask for the same comparison


NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-+])?"  # a sign, unless it is the operator of a difference or a sum
    r"(?:(?<![A-Za-z\d.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![A-Za-z\d.])\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\w))?(?:/\d+(?![\d/]))?"
)
SIGN = re.compile(r"(?<![\w)\].%}])(?<![\w)\]%}]\$)(?<![\d)\]%}]\s)([-+\u2013\u2212])(?:\\?\$)?(?=\.?\d)")
"""A sign, also an en dash or U+2212, and the dollar sign after it; not the dash of a range, nor an operator."""
GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d))")
"""What LaTeX has between thousands."""
SPACED_THOUSANDS = re.compile(r"(?<![\d.,/])\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)")
MIXED = re.compile(r"(?<![\w.,/])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\d/.])")
DIGIT = re.compile(r"\d")
STATED = re.compile(r"\banswer(?:\s+is(?!\s+not\b)|\s+to[^.\n]{0,300}?(?<!\s)\s+is|\s*[:=])+\s*:?", re.IGNORECASE)
"""The number of characters after "answer to" is limited, since each "answer" searches them."""
SENTENCE_END = re.compile(r"\n|[.!?](?:\s|$)")
FORMULA = re.compile(r"[\d\\$+*^=<>_|]|(?<![A-Za-z])[A-Za-z]?[-/,;][A-Za-z]?(?![A-Za-z])")
"""A digit, LaTeX, an operator, or a sign or separator that is not between words of two letters or more."""
SPACED_SEPARATOR = re.compile(r"\s*([-/,;])\s*")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
MAX_DISPLAYED = 300
DISPLAYED = re.compile(
    rf"(?<!\\)\$(?!\s)([^$\n]{{1,{MAX_DISPLAYED}}})(?<!\s)(?<!\\)\$(?!\d)|\\\((.{{1,{MAX_DISPLAYED}}}?)\\\)"
)
"""A formula in dollar signs, which are not those of amounts of money, or in LaTeX's brackets."""
BARE_FORMULA = re.compile(r"(?:[-+*/=(){}\[\]\d.,!|\s^_]|\\[A-Za-z]+|(?<![A-Za-z\\])(?:[A-Za-z]|mod)(?![A-Za-z]))+")
COMPUTED = re.compile(
    r"\\(?:[dtc]?frac|[dt]?binom|sqrt|pi|log|ln|sin|cos|tan)(?![A-Za-z])|[\d)}]\^(?!\{?\\?[a-z]{2})|\d_\{?\d"
    r"|\d\.\d*\\(?:overline|bar|dot)"
)
UNIT = re.compile(r"(?:\\[ ,;:!]|[~\s])*\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")
RELATION = re.compile(r"=|\\(?:approx|to|implies|[Rr]ightarrow)(?![a-z])")
PART_END = re.compile(rf"{RELATION.pattern}|\s(?=\((?!\\?[bp]?mod))|,\s|\n|[.!](?:\s|$)")
"""What separates the parts of a formula in dollar signs, and of one in the text, unless it is in brackets."""
BRACKETS = re.compile(r"[(\[{](?:[^()\[\]{}\n]|[({][^(){}\n]*[)}])*[)\]}]")
JOINED = re.compile(
    r"(?<![\\{])[,;](?!\s*\\(?:q?quad|text))|\\(?:[bp]?mod|pod|equiv|pm|mp|text\s*\{\s*(?:and|or)\b)|(?<![A-Za-z\\])mod\b"
)
"""What makes a tuple, an interval, a list or a residue of its numbers: none of them is its value."""
OF_VARIABLES = re.compile(r"[\d)][A-Za-z](?![A-Za-z])|\\begin|\)\(")
"""Numbers times variables, products of sums, matrices; `$5 m$`, with a space, has a unit."""
VARIABLE_FIRST = re.compile(r"[-+]?[A-Za-z](?![A-Za-z])(?!\s*(?:[<>:]|\\[gl]eq?(?![a-z])))")
"""A variable that no bound follows: `$n \\ge 12$` states 12."""
SIZED = re.compile(r"\\(?:left|right)(?![a-z])")
BRACKET = re.compile(r"[(\[{]")
CHOICE = re.compile(r"^\s*\(([a-z])\)\s*$")
ARTICLE_OF_WORD = re.compile(r"\b(?:the|an|a(?=\s+[a-z]{2}))\b")
TOLERANCE, SMALL_TOLERANCE = Fraction(1, 10**9), Fraction(1, 10**6)
"""How far an answer may be from a reference if they are not both whole: the first, times the reference if that is above
1, since decimals are rounded; but no more than the second times the reference, which may itself be tiny. For 0 it is
the rounding of floating point, 1e-12."""


async def judge_number(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Judge for `tune()`: reward 1.0 if the response's final answer equals `task["answer"]`, else 0.0."""
    score = score_numeric(read_text(response), read_reference(task))
    return JudgeOutput(reward=score, metrics=None if score is None else {"accuracy": score})


def read_reference(task: Mapping[str, Any]) -> str:
    """`task["answer"]` as text; empty if it is null."""
    answer = task["answer"]
    return "" if answer is None else str(answer)


def score_numeric(text: str, answer: str) -> float | None:
    """1.0 if the final answer of `text` equals `answer`, else 0.0; None if `answer` contains no answer."""
    reference = extract_marked(answer) or answer.strip()
    candidate = extract_answer(text)
    reference_number = parse_number(reference)
    if candidate is None:
        return 0.0 if reference_number is not None else _score_expressions(None, reference)
    candidate_number = parse_number(candidate)
    if reference_number is not None and candidate_number is not None:
        return float(is_equal(candidate_number, reference_number))
    if reference_number is not None and not DIGIT.search(candidate):
        return 0.0  # words, which math-verify would parse as a product of letters
    return _score_expressions(candidate, reference)


def score_symbolic(text: str, answer: str) -> float | None:
    """As `score_numeric`, with math-verify for numbers too."""
    return _score_expressions(extract_answer(text), extract_marked(answer) or answer.strip())


def read_text(response: Any) -> str:
    """The text of a response: a string, a message with `get_text_content()`, or one with `content`."""
    if isinstance(response, str):
        return response
    if hasattr(response, "get_text_content"):
        return response.get_text_content() or ""
    content = response.get("content") if isinstance(response, Mapping) else getattr(response, "content", None)
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        parts = (part if isinstance(part, Mapping) else getattr(part, "__dict__", {}) for part in content)
        return "".join(str(part["text"]) for part in parts if "text" in part)
    raise TypeError(f"a response of type {type(response).__name__} has no text; return a string or a message")


def extract_answer(text: str) -> str | None:
    """The final answer of `text` as written, or None if there is none."""
    text = text.replace("\N{MINUS SIGN}", "-")
    marked = extract_marked(text)
    if marked is not None:
        return marked
    text = write_plainly(text)
    statements = list(STATED.finditer(text))
    if statements:
        rest = join_thousands(text[statements[-1].end() :].lstrip())
        sentence = SENTENCE_END.split(rest, maxsplit=1)[0]
        start = sentence.rfind("=") + 1
        number = NUMBER.search(sentence, start) or NUMBER.search(rest)
        if number is None:
            return sentence[start:].strip(" $*.") or None
        return _find_formula(rest, number.start()) or number.group()
    last = _find_last_number(text)
    return last and (_find_formula(text, text.rfind(last)) or last)


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}`; None without one, or if it is not closed."""
    start = text.rfind("\\boxed{")
    boxed = read_braces(text[start + len("\\boxed") :]) if start >= 0 else None
    return boxed and boxed.strip()


def extract_marked(text: str) -> str | None:
    r"""The content of the last `\boxed{}`, else the text after the last `####` on its line; None without either."""
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, rest = text.rpartition("####")
    if not mark:
        return None
    line = join_thousands(write_plainly(rest.strip().split("\n", 1)[0]))
    number = NUMBER.search(line)
    return (number and (_find_formula(line, number.start()) or number.group())) or line.strip() or None


def write_plainly(text: str) -> str:
    """The text with its numbers as `NUMBER` reads them: `-$5` as -5, `1{,}000` as 1000, `3 1/2` as 7/2."""
    return MIXED.sub(_add_whole, GROUPED.sub("", SIGN.sub(lambda found: "+" if found[1] == "+" else "-", text)))


def join_thousands(text: str) -> str:
    """The text with numbers such as `12 000` in one piece; for stated answers only, since prose has `in 20 100`."""
    return SPACED_THOUSANDS.sub(lambda found: "".join(found[0].split()), text)


def _add_whole(found: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, found.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else found[0]


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number; `$`, `*`, a percent sign and a final full stop are ignored."""
    unescaped = text.replace("\\$", "$").replace("\\%", "%")
    bare = join_thousands(write_plainly(unescaped.strip().strip("$*").rstrip(".%$*").strip()))
    if not NUMBER.fullmatch(bare):
        return None
    try:
        return Fraction(bare.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def has_formula(text: str) -> bool:
    """Whether a text has digits, operators or LaTeX, or is a list of letters: its words do not say what it means."""
    return FORMULA.search(SPACED_SEPARATOR.sub(r"\1", text)) is not None


def normalize_formula(text: str) -> str:
    r"""Lower case and single spaces, without dollar signs, `\left`, `\right`, thousands separators, the signs between
    the items of a list, brackets around one letter and a final full stop; every other sign is kept, and so is a text of
    such signs alone, so that an empty answer matches nothing."""
    bare = SIZED.sub("", text.lower()).replace("\\$", "").replace("$", "").replace("\\%", "%")
    bare = bare.replace("\N{MINUS SIGN}", "-")
    if not BRACKET.search(bare):  # (2,251,252) is a triple
        bare = THOUSANDS.sub("", bare)
    bare = CHOICE.sub(r"\1", bare)
    kept = " ".join(ARTICLE_OF_WORD.sub(" ", re.sub("[,;]", " ", bare)).rstrip(" .").split())
    return kept or " ".join(text.lower().split())


def is_equal(left: Fraction, right: Fraction) -> bool:
    if left.denominator == right.denominator == 1:
        return left == right
    size = abs(right) or SMALL_TOLERANCE
    return abs(left - right) <= min(TOLERANCE * max(Fraction(1), size), SMALL_TOLERANCE * size)


def _find_formula(text: str, start: int) -> str | None:
    r"""The formula that the number at `start` is a part of; None if the number stands for itself.

    No number is the value of `$\frac{1}{2}$`, `2^{10}` and `$x^2 + 1$`; one is that of `$18$` and `$5\text{ cm}$`.
    """
    near = max(start - MAX_DISPLAYED, 0), start + MAX_DISPLAYED
    found = [each for kind in (DISPLAYED, BARE_FORMULA) for each in kind.finditer(text, *near)]
    whole = next((each for each in found if each.start() <= start < each.end()), None)
    if whole is None:
        return None
    shown = whole.lastindex
    at, formula = start - whole.start(shown or 0), whole[shown or 0]
    brackets = [each.span() for each in BRACKETS.finditer(formula)]
    ends = [each.span() for each in (RELATION if shown else PART_END).finditer(formula)]
    ends = [(begin, end) for begin, end in ends if not any(left < begin and end < right for left, right in brackets)]
    first = max((end for _, end in ends if end <= at), default=0)
    value = formula[first : min((begin for begin, _ in ends if begin >= at), default=len(formula))].strip(" *.,")
    is_of_variables = shown and (VARIABLE_FIRST.match(value) or OF_VARIABLES.search(value))
    is_term = COMPUTED.search(value) or is_of_variables or JOINED.search(NUMBER.sub("", value))
    return UNIT.sub("", value) if is_term and value.count("{") == value.count("}") else None


def _find_last_number(text: str) -> str | None:
    """The last match of `NUMBER`. A match contains no space, so words are searched from the end."""
    for word in reversed(text.split()):
        if DIGIT.search(word) and (numbers := NUMBER.findall(word)):
            return str(numbers[-1])
    return None


def read_braces(text: str) -> str | None:
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:position]
    return None


def _score_expressions(candidate: str | None, reference: str) -> float | None:
    is_equal = compare_in_time(candidate, reference)
    return None if is_equal is None else float(is_equal)
