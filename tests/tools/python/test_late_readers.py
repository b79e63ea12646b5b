"""An answer that came within its time limit counts, however late a busy machine lets its reader run."""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace

import pytest

from tunesmith.tools.python import worker
from tunesmith.tools.python.worker_process import WorkerProcess


@pytest.fixture
def pipe():
    """Makes pipes with some bytes in them."""
    opened = []

    def build(data=b""):
        ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        opened.extend(ends)
        os.write(ends[1], data)
        return ends

    yield build
    for end in opened:
        os.close(end)


@pytest.mark.parametrize("is_session", [False, True])
def test_a_worker_reads_an_answer_before_it_looks_at_the_time(pipe, monkeypatch, is_session):
    answered, output = next(iter(worker.OUTCOMES)), pipe(b"42")[0]
    child = SimpleNamespace(
        pid=None, code=pipe()[1], status_pipe=pipe(answered)[0], stdout=output, stderr=pipe()[0], wait_status=None,
        wait_ready=lambda: None, poll=lambda: False,
    )  # fmt: skip
    now = itertools.chain([0.0, 0.0], itertools.repeat(1000.0))
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: next(now)))
    config = {"wall_s": 1.0, "is_session": is_session, "max_output_bytes": 100, "cpu_s": 1, "tmp": "/", "tmp_mb": None}
    answer = worker.Call(config, child, b"print(42)").run(pipe()[0], pipe()[0])
    assert (answer["outcome"], answer["stdout"]) == (worker.OUTCOMES[answered], "42")


def test_the_pool_reads_an_answer_before_it_looks_at_the_time(pipe):
    worker_process = WorkerProcess.__new__(WorkerProcess)
    worker_process._process = SimpleNamespace(stdout=SimpleNamespace(fileno=lambda: answer))
    answer = pipe(b"abcd")[0]
    assert worker_process._read(4, time.monotonic() - 1) == b"abcd"
