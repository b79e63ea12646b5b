"""The time of a call of the Python tool: waiting for a worker counts toward no limit but its own."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from sandboxes import require_isolation
from tunesmith.config import PythonToolSection
from tunesmith.errors import SandboxError
from tunesmith.tools.python.tool import PythonTool


def build(timeout_s, *, is_session=False):
    require_isolation("seccomp")
    section = PythonToolSection(isolation="seccomp", num_workers=1)
    return replace(PythonTool(section).build_tool(is_session=is_session), timeout_s=timeout_s)


def call_together(tool, *codes):
    async def call():
        return await asyncio.gather(*(tool.call({"code": code}) for code in codes), return_exceptions=True)

    return asyncio.run(call())


def test_waiting_for_a_worker_does_not_count_toward_the_time_limit_of_the_tool():
    sleeps = ["import time; time.sleep(0.4); 1"] * 8
    results = call_together(build(3), *sleeps)  # the last one ends after 3.2 s
    assert [(result.text, result.failure) for result in results] == [("1", "")] * 8


@pytest.mark.parametrize("is_session", [False, True])
def test_a_call_that_runs_too_long_is_stopped(is_session):
    tool = build(0.3, is_session=is_session)

    async def call():
        if not is_session:
            return await tool.call({"code": "while True: pass"})
        async with tool.open_session() as run:
            return await tool.call({"code": "while True: pass"}, run=run)

    result = asyncio.run(call())
    assert (result.failure, result.text) == ("timeout", "Error: python took longer than 0.3 s and was stopped.")


def test_waiting_too_long_is_an_error_that_names_the_knobs():
    python = PythonTool(PythonToolSection(num_workers=1, max_wait_s=0.2))
    is_free = threading.Event()
    python._pool._threads.submit(is_free.wait)  # the only worker is at work
    try:
        with pytest.raises(SandboxError) as caught:
            asyncio.run(python("2"))
    finally:
        is_free.set()
        python.close()
    assert str(caught.value) == (
        "a call of the Python tool waited 0.2 s for one of 1 workers: raise num_workers of the tool, or max_wait_s"
    )
