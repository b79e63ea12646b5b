r"""The scores of ET-Agent's own evaluation code (arXiv:2601.06860), to compare with its published numbers.

They differ from those of `tir_judge`: punctuation is kept in words ("Paris." is not "Paris"), yes and no are words like
any other, mathematics is compared as text after the normalization of MATH (Hendrycks et al., 2021, arXiv:2103.03874),
so that 72.0 is not 72, and only the first accepted answer of a math task counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tunesmith.judges.squad import ARTICLES, compute_overlap

NUM_LINES = 5
"""Without a prediction, the code compares the last lines of the output."""
REMOVED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
FRACTION = re.compile(r"(0|-?[1-9]\d*)/(0|-?[1-9]\d*)")
LIST_COMMA = re.compile(r",\s*")


def compute_paper_scores(prediction: str, output: str, answer: Any, *, is_math: bool) -> dict[str, float]:
    """`em`, `acc` (an accepted answer is part of the prediction), `f1` and `math_equal` of a prediction, or of the last
    lines of the output if there is none."""
    text = prediction or "\n".join(output.replace("\n\n", "\n").strip().split("\n")[-NUM_LINES:])
    golds = list_golds(answer, is_math=is_math)
    if not text:
        return dict.fromkeys(("em", "acc", "f1", "math_equal"), 0.0)
    found = normalize(text, has_articles=is_math)
    expected = [normalize(each, has_articles=is_math) for each in golds]
    return {
        "em": float(found in expected),
        "acc": float(any(each in found for each in expected)),
        "f1": max(compute_overlap(found, each) for each in expected),
        "math_equal": float(any(is_equal_text(found, each) for each in expected)),
    }


def list_golds(answer: Any, *, is_math: bool) -> list[str]:
    """The accepted answers as the code reads them: of mathematics the first, of a text in brackets its parts."""
    if isinstance(answer, str) and answer.startswith("[") and not is_math:
        return [each.strip() for each in LIST_COMMA.split(answer.strip("[]"))]
    answers = answer if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
    texts = [str(each).rpartition("####")[2].strip() if is_math else str(each) for each in answers]
    return texts[:1] if is_math else texts


def normalize(text: str, *, has_articles: bool) -> str:
    lowered = text.lower().strip()
    return " ".join((lowered if has_articles else ARTICLES.sub(" ", lowered)).split())


def is_equal_text(left: str, right: str) -> bool:
    """Whether two formulas are the same text once normalized; as they are if one of them is malformed."""
    try:
        return normalize_latex(left) == normalize_latex(right)
    except (IndexError, ValueError):
        return left == right


def normalize_latex(text: str) -> str:
    """The normalization of MATH; raises IndexError or ValueError where its code fails."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for each in REMOVED:
        text = text.replace(each, "")
    if "\\text{ " in text:  # units
        text, _ = text.split("\\text{ ")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, *values = text.split("=")
    if len(values) == 1 and len(name) <= 2:
        text = values[0]
    text = _join("\\sqrt", text, 1).replace(" ", "")
    text = "\\frac{1}{2}" if (text := _join("\\frac", text, 2)) == "0.5" else text
    quotient = FRACTION.fullmatch(text)
    return text if quotient is None else f"\\frac{{{quotient[1]}}}{{{quotient[2]}}}"


def _join(command: str, text: str, num_arguments: int) -> str:
    """The text with braces around arguments of one character; unchanged if an argument of a fraction is missing."""
    head, *parts = text.split(command)
    for part in parts:
        if part[0] != "{":
            if len(part) < num_arguments:
                return text
            second = part[1:] if num_arguments == 1 or part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            part = f"{{{part[0]}}}{second}"
        head += command + part
    return head
