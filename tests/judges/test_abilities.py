"""What the tasks of a set are scored as, and the scores of mathematics and of questions under the suite `tir`."""

from __future__ import annotations

import asyncio
import json

import pytest
from transcripts import replies

from tunesmith.commands.eval.suites import load_suite_tasks
from tunesmith.config import DatasetSection
from tunesmith.errors import DataError
from tunesmith.judges.composite import exact_judge
from tunesmith.judges.tir import find_ability, tir_judge
from tunesmith.judges.transcript import Reply


def score(prediction, gold, *, ability="math", form="<answer>\\boxed{%s}</answer>"):
    response = replies(Reply(content=form % prediction))
    return asyncio.run(tir_judge({"question": "?", "answer": gold, "ability": ability}, response))


MATH = [
    ("6 - 5i", "6 + 5i", 0.0), ("6 - 5i", "-5i+6", 1.0), ("6 - 5i", "6-5i", 1.0),
    ("1,-2", "12", 0.0), ("1,-2", "1,2", 0.0), ("1,-2", "-2, 1", 1.0), ("1,3,5", "135", 0.0), ("1,3,5", "1,3", 0.0),
    ("52_8", "528", 0.0), ("52_8", "52_{8}", 1.0), ("2516_8", "2516_7", 0.0), ("4210_{5}", "4210_5", 1.0),
    ("$(2,251,252)$", "(2251252)", 0.0), ("58,500", "58500", 1.0),
    ("-4", "4", 0.0), ("-4", "-4.0", 1.0), ("p - q", "p + q", 0.0), ("p - q", "-q + p", 1.0),
    ("15x - 80", "15x + 80", 0.0), ("15x - 80", "5(3x - 16)", 1.0), ("2k", "2 k", 1.0), ("2k", "k", 0.0),
    ("\\text{Evelyn}", "Evelyn", 1.0), ("\\text{Evelyn}", "evelyn", 1.0), ("\\text{Evelyn}", "Evelyn Carla", 0.0),
    ("\\text{east}", "\\text{west}", 0.0), ("\\text{ellipse}", "an ellipse", 1.0),
    ("\\text{east}", "seat", 0.0),
    ("\\text{(C)}", "C", 1.0),
    ("$(0,1,1),(1,0,1)$,$(-1,-1,0)$", "(0,1,1),(1,0,1),(-1,-1,0)", 1.0),
    ("$(0,1,1),(1,0,1)$,$(-1,-1,0)$", "(0,1,1),(1,0,1),(1,1,0)", 0.0),
    ("$f(x)=a x+b$, where $b$ is an integer, and $a$ is positive with $g(a)=0$", "f(x)=a x-b", 0.0),
    ("$f(x)=a x+b$, where $b$ is an integer, and $a$ is positive with $g(a)=0$", "g(a)=0", 0.0),
    ("$(-\\infty, 0) \\cup\\{1\\}$.", "(-\\infty, 0) \\cup\\{1\\}", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "prediction", "equal"), MATH)
def test_wrong_mathematics_has_no_credit_and_right_mathematics_has_all(gold, prediction, equal):
    output = score(prediction, gold)
    assert (output.reward, output.metrics["math_equal"]) == (equal, equal)
    assert "f1" not in output.metrics, "words are not compared in formulas"


@pytest.mark.parametrize("form", ["<answer>%s</answer>", "<answer>The answer is %s.</answer>", "So it is \\boxed{%s}."])
@pytest.mark.parametrize(
    ("gold", "prediction", "equal"),
    [("\\text{Evelyn}", "Evelyn", 1.0), ("\\text{Evelyn}", "Angela", 0.0), ("6 - 5i", "-5i+6", 1.0),
     ("6 - 5i", "6 + 5i", 0.0), ("1,-2", "12", 0.0), ("\\frac{1}{2}", "1/2", 1.0), ("7", "7", 1.0)],
)  # fmt: skip
def test_mathematics_is_compared_in_every_form_of_an_answer(form, gold, prediction, equal):
    assert score(prediction, gold, form=form).reward == equal


@pytest.mark.parametrize(
    ("gold", "prediction", "em"),
    [("-4", "4", 0.0), ("-4", "-4", 1.0), ("6 - 5i", "6 + 5i", 0.0), ("1,-2", "12", 0.0), ("72", "72.0", 0.0),
     ("X^2", "x^2", 1.0), ("\\text{Evelyn}", "Evelyn", 1.0)],
)  # fmt: skip
def test_exact_match_of_mathematics_keeps_signs(gold, prediction, em):
    assert score(prediction, gold).metrics["em"] == em


@pytest.mark.parametrize(
    ("gold", "prediction", "equal"),
    [("6 - 5i", "6 + 5i", 0.0), ("1,-2", "12", 0.0), ("52_8", "528", 0.0), ("-x", "x", 0.0), ("6 - 5i", "6 - 5i", 1.0),
     ("7 May, 1990", "7 may 1990", 1.0), ("Jean-Paul", "Jean Paul", 0.0), ("1,000", "1000", 1.0)],
)  # fmt: skip
def test_the_exact_judge_keeps_operators(gold, prediction, equal):
    output = asyncio.run(exact_judge({"answer": gold}, f"\\boxed{{{prediction}}}"))
    assert output.reward == equal


@pytest.mark.parametrize(
    ("gold", "ability"),
    [("12", "math"), ("p - q", "math"), ("a, b, c", "math"), ("\\text{Evelyn}", "math"), ("7 May 1990", "math"),
     ("-x", "math"), ("y = z", "math"), ("Paris", "qa"), ("Jean-Paul Sartre", "qa"), ("AC/DC", "qa"), ("X-Men", "qa"),
     ("Washington, D.C.", "qa"), ("Paris - France", "qa"), ("yes", "qa")],
)  # fmt: skip
def test_without_a_known_set_formulas_digits_and_lists_are_mathematics(gold, ability):
    assert find_ability({}, [gold]) == ability


def load(path, rows, *, name="held_out", **fields):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [each.row.get("ability") for each in load_suite_tasks(DatasetSection(path=str(path), **fields), name=name)]


DATE, WORD = {"question": "when?", "answer": "1990"}, {"question": "who?", "answer": "Evelyn"}


@pytest.mark.parametrize(
    ("name", "file", "ability"),
    [("math500", "a.jsonl", "math"), ("MATH-500", "a.jsonl", "math"), ("amc23", "a.jsonl", "math"),
     ("s", "olympiadbench/test.jsonl", "math"), ("s", "gsm8k.jsonl", "math"), ("aime_2024", "a.jsonl", "math"),
     ("bamboogle", "a.jsonl", "qa"), ("s", "musique/test.jsonl", "qa"), ("HotpotQA_dev", "a.jsonl", "qa"),
     ("2wiki", "a.jsonl", "qa"), ("bamboogle", "math500/test.jsonl", "qa"), ("s", "a.jsonl", None)],
)  # fmt: skip
def test_a_set_is_known_by_its_name_or_its_path(tmp_path, name, file, ability):
    assert load(tmp_path / file, [DATE, WORD], name=name) == [ability, ability]


def test_the_run_file_decides_before_the_name_and_a_row_before_both(tmp_path):
    rows = [DATE, WORD | {"ability": "qa"}]
    assert load(tmp_path / "a.jsonl", rows, name="bamboogle", fields={"ability": "math"}) == ["math", "qa"]


def test_an_unknown_ability_of_a_row_is_refused_before_a_model_loads(tmp_path):
    with pytest.raises(DataError, match=r"row 1 of .* has ability='poetry'; allowed: math, qa"):
        load(tmp_path / "a.jsonl", [DATE, WORD | {"ability": "poetry"}])


def test_questions_of_a_known_set_are_scored_by_f1_whatever_their_answers(tmp_path):
    output = score("May 1990", "7 May 1990", ability="qa")
    assert output.reward == pytest.approx(4 / 5)
    assert output.metrics == {"em": 0.0, "f1": pytest.approx(4 / 5)}
