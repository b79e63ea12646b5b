"""The word problem generator: correct answers, deterministic, with disjoint train and test sets."""

from __future__ import annotations

import ast
import json
import re
from fractions import Fraction
from operator import add, mul, sub, truediv

from tunesmith.tasks.arithmetic import TEMPLATES, build_problems, compute_answer, find_split, save_problems


def test_same_seed_same_problems():
    assert build_problems("train", num_problems=20, seed=1) == build_problems("train", num_problems=20, seed=1)
    assert build_problems("train", num_problems=20, seed=1) != build_problems("train", num_problems=20, seed=2)


def test_splits_are_disjoint_for_all_seeds():
    train = {p.question for seed in range(3) for p in build_problems("train", num_problems=500, seed=seed)}
    test = {p.question for seed in range(3) for p in build_problems("test", num_problems=200, seed=seed)}
    assert not train & test
    assert {find_split(question) for question in test} == {"test"}


def test_questions_of_a_set_differ():
    problems = build_problems("test", num_problems=300, seed=0)
    assert len({problem.question for problem in problems}) == 300


def test_answers_are_whole_and_numbers_small():
    for problem in build_problems("train", num_problems=500, seed=0):
        assert Fraction(eval(problem.expression)) == int(problem.answer) >= 0
        numbers = [int(digits) for digits in re.findall(r"\d+", problem.expression)]
        assert max(numbers) <= 999
        assert problem.num_operations == len(numbers) - 1 <= 3
        assert all(str(number) in problem.question for number in numbers)


def test_templates_use_the_numbers_of_their_expression():
    for sizes, expression, text in TEMPLATES:
        for key in "abcd"[: len(sizes)]:
            assert f"{{{key}}}" in text and f"{{{key}}}" in expression


def list_results(node):
    """The value of an expression, last, and all results before it."""
    if isinstance(node, ast.Constant):
        return [Fraction(node.value)]
    left, right = list_results(node.left), list_results(node.right)
    operations = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
    return [*left, *right, operations[type(node.op)](left[-1], right[-1])]


def test_every_intermediate_result_is_a_whole_number_that_is_not_negative():
    for problem in build_problems("train", num_problems=2000, seed=3):
        results = list_results(ast.parse(problem.expression, mode="eval").body)
        assert all(each >= 0 and each.denominator == 1 for each in results), problem
        assert str(results[-1]) == problem.answer


def test_negative_and_fractional_results_are_refused():
    assert compute_answer("3 - 5") is None
    assert compute_answer("7 / 2") is None
    assert compute_answer("2 + 3 * 4") == 14
    assert compute_answer("(10 * 5 - 2) / 3") == 16


def test_files_have_one_problem_per_line(tmp_path):
    save_problems(folder := tmp_path / "data", num_train=5, num_test=3, seed=0)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and set(rows[0]) == {"question", "answer", "expression", "num_operations"}
    assert len((folder / "test.jsonl").read_text().splitlines()) == 3
