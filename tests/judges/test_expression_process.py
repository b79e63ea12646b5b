"""Expressions are compared within a time limit in every thread; what math-verify cannot finish is not equal."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tunesmith.errors import RolloutError
from tunesmith.judges import expression_process
from tunesmith.judges.expression_process import ExpressionProcess
from tunesmith.judges.numeric import score_numeric, score_symbolic

POWER_TOWER = "\\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def thread():
    with ThreadPoolExecutor(1) as threads:
        yield threads


def call(thread, function, *arguments):
    return thread.submit(function, *arguments).result(timeout=60)


def test_answer_that_takes_hours_is_not_equal_in_a_thread(thread):
    assert call(thread, score_numeric, POWER_TOWER, "x^2+1") == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("\\boxed{1+x^2}", "x^2+1", 1.0),
        ("\\boxed{x^2}", "x^2+1", 0.0),
        ("I do not know", "x^2+1", 0.0),
        ("\\boxed{x}", "", None),
    ],
)
def test_thread_scores_as_the_main_thread_does(thread, text, answer, score):
    assert call(thread, score_numeric, text, answer) == score_numeric(text, answer) == score
    assert call(thread, score_symbolic, text, answer) == score_symbolic(text, answer) == score


def test_lost_process_is_replaced_once_and_then_a_failure(monkeypatch):
    process = ExpressionProcess()
    try:
        assert process.compare("2", "1+1") is True
        os.kill(process._process.pid, signal.SIGKILL)
        assert process.compare("2", "1+1") is True
        monkeypatch.setattr(expression_process.sys, "executable", "/bin/false")
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(RolloutError, match="lost 2 times"):
            process.compare("2", "1+1")
    finally:
        process.close()


def test_process_that_does_not_answer_is_killed_and_its_candidate_not_equal(monkeypatch):
    monkeypatch.setattr(expression_process, "ANSWER_TIMEOUT_S", 0.2)
    process = ExpressionProcess()
    try:
        assert process.compare("9^{9^{9^{9}}}", "x^2+1") is False
        assert process._process is None
        assert process.compare(None, "x^2+1") is False
    finally:
        process.close()
