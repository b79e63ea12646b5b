"""Expressions are compared within a time limit in every thread: an answer that takes longer is wrong, a reference that
takes longer is a failure."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from conditions import HANG_S
from tunesmith.errors import RolloutError
from tunesmith.judges import numeric
from tunesmith.judges.composite import gsm8k_judge
from tunesmith.judges.expressions import is_too_large
from tunesmith.judges.numeric import ExpressionProcess, score_numeric, score_symbolic

LONG_OPERATION = "\\boxed{(9^{9})^{9^{9}}}"
POWER_TOWER = "\\boxed{9^{9^{9^{9}}}}"


def test_the_parts_of_a_judge_compare_an_expression_once():
    before = numeric.compare_in_time.cache_info().misses
    output = asyncio.run(gsm8k_judge({"answer": "1/2 + x"}, "\\boxed{x + \\frac{2}{4}}"))
    assert (output.metrics["accuracy"], output.metrics["exact"]) == (1.0, 1.0)
    assert numeric.compare_in_time.cache_info().misses == before + 1


CANCELLED = '{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}\n'


def write_request(number, candidate, reference):
    params = {"candidate": candidate, "reference": reference}
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": "compare", "params": params}) + "\n"


@pytest.fixture(scope="module")
def thread():
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture(autouse=True)
def short_end(monkeypatch):
    """A process that computes does not end when its input does, and computes until it is killed."""
    monkeypatch.setattr("tunesmith.json_rpc.END_TIMEOUT_S", 0.1)


def call(thread, function, *arguments):
    return thread.submit(function, *arguments).result(timeout=HANG_S)


@pytest.mark.parametrize(
    ("text", "is_large"),
    [
        ("9^{9^{9^{9}}}", True),
        ("(10^{10^{10}})!", True),
        ("10^{1000001}", True),
        ("10^{999999}", False),
        ("2**3300000", False),
        ("2**3400000", True),
        ("2^{3^{2}}", False),
        ("1^{9^{99}}", False),
        ("x^{2^{10}} + 12!", False),
        ("200000!", False),
        ("210000!", True),
        ("2^{1^{9^{99}}}", False),
        ("(2)^{9999999999}", True),
        ("(-2)^{9999999999}", True),
        ("{3}^{9999999999}", True),
        ("2^{-9999999999}", True),
        ("3^{9\\cdot 999999999}", True),
        ("3**(9*999999999)", True),
        ("\\sqrt{3}^{9999999999}", True),
        ("2^{3 \\times 4^{30}}", True),
        ("(9999999999)!", True),
        ("(2^{10})^{10}", False),
        ("(10^{6})^{8}", False),
        ("2^{10^{-7}}", False),
        ("10\\cdot 10^{600000}", False),
        ("2^{3}\\cdot 4^{10}", False),
        ("2^{3\\cdot 4^{5}}", False),
        ("(x+2)^{10} - (3)^{-2}", False),
    ],
)
def test_powers_and_factorials_of_many_digits_are_recognized(text, is_large):
    assert is_too_large(text) == is_large


def test_answer_that_takes_hours_is_not_equal(thread):
    """Its size is known before it is computed."""
    assert call(thread, score_numeric, POWER_TOWER, "x^2+1") == score_numeric(POWER_TOWER, "x^2+1") == 0.0
    for text in ("(2)^{9999999999}", "2^{-9999999999}", "3^{9\\cdot 999999999}", "\\sqrt{3}^{9999999999}"):
        assert score_numeric(f"\\boxed{{{text}}}", "4") == 0.0


def test_answer_that_takes_too_long_is_wrong_where_the_reference_does_not(monkeypatch):
    monkeypatch.setattr(numeric, "ANSWER_TIMEOUT_S", 1.0)
    assert score_numeric(LONG_OPERATION, "x^2+1") == 0.0


def test_reference_that_takes_too_long_is_a_failure_in_the_main_thread(monkeypatch):
    monkeypatch.setattr(numeric, "ANSWER_TIMEOUT_S", 1.0)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"the reference '\(9\^\{9\}\)\^\{9\^\{9\}\}' with a number in time"):
        score_numeric("\\boxed{1+x^2}", LONG_OPERATION)
    assert time.monotonic() - started < 60
    assert score_numeric("\\boxed{1+x^2}", "x^2+1") == 1.0


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


def kill_process(process):
    """As the kernel does where memory runs out."""
    os.kill(process._shared.get()._process.pid, signal.SIGKILL)


def test_lost_process_is_replaced_once_and_then_a_failure(monkeypatch):
    process = ExpressionProcess()
    try:
        assert process.compare("2", "1+1") is True
        kill_process(process)
        assert process.compare("2", "1+1") is True
        monkeypatch.setattr(numeric.sys, "executable", "/bin/false")
        kill_process(process)
        with pytest.raises(RolloutError, match="lost 2 times"):
            process.compare("2", "1+1")
    finally:
        process.close()


def test_process_that_does_not_answer_is_killed_and_replaced(monkeypatch):
    process = ExpressionProcess()
    try:
        # the process that replaces it may take longer to answer on a busy machine
        with monkeypatch.context() as patch, pytest.raises(RolloutError, match="in time"):
            patch.setattr(numeric, "ANSWER_TIMEOUT_S", 0.2)
            process.compare("x^2+1", "(9^{9})^{9^{9}}")
        assert process.compare(None, "x^2+1") is False
    finally:
        process.close()


def test_program_answers_that_it_is_late_and_serves_the_next_request():
    program = "from tunesmith.judges import expressions; expressions.TIMEOUT_S = 1e-4; expressions.main()"
    requests = write_request(1, "x^2+1", "1+x^2") + CANCELLED + write_request(2, None, "")
    ended = subprocess.run(
        [sys.executable, "-c", program], input=requests, text=True, timeout=HANG_S, capture_output=True
    )
    first, second = map(json.loads, ended.stdout.splitlines())
    assert (first["id"], first["result"], second["id"]) == (1, "late", 2)


def test_fork_while_a_thread_compares_has_a_process_of_its_own(thread):
    process = ExpressionProcess()
    numeric.os.register_at_fork(after_in_child=process.forget)
    try:
        assert process.compare("2", "1+1") is True
        with process._lock:  # as while another thread compares
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # ends a child that waits for the lock
                is_right = process.compare("2", "1+1") is True and process.compare("3", "1+1") is False
                process.close()
                os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert process.compare("2", "1+1") is True
    finally:
        process.close()


def test_program_without_an_owner_ends_inside_of_one_multiplication():
    program = "from tunesmith.judges import expressions; expressions.MAX_CPU_S = 1; expressions.main()"
    request = write_request(1, "(9^{9})^{9^{9}}", "x+1")
    ended = subprocess.run([sys.executable, "-c", program], input=request, text=True, timeout=HANG_S)
    assert ended.returncode == -signal.SIGPROF
