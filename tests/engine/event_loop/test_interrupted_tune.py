"""Ctrl-C while `tune` runs in a thread of its own, as in a notebook."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from conditions import wait_until
from tunesmith.engine.event_loop import notebook
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.engine.event_loop.signal_handlers import interrupt_thread

WAIT_S = 60.0
"""Far longer than any test takes; only a run that is not interrupted waits for so long."""


def interrupt_soon() -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.fixture
def interrupt_often(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sends Ctrl-C a number of times, each after the one before was passed on to the thread: two at once are one."""
    num_passed_on = 0

    def count(thread: threading.Thread) -> bool:
        nonlocal num_passed_on
        is_code_interrupted = interrupt_thread(thread)
        num_passed_on += 1
        return is_code_interrupted

    def send(number: int) -> None:
        for num_before in range(number):
            wait_until(lambda num_before=num_before: num_passed_on >= num_before)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(notebook, "interrupt_thread", count)
    return lambda number: threading.Thread(target=send, args=(number,), daemon=True).start()


async def call_in_a_loop(work: Callable[[], object]) -> None:
    run_outside_of_loops(work)


def run_in_notebook_loop(work: Callable[[], object]) -> None:
    """On a loop whose thread keeps Python's own SIGINT handler, as a notebook's kernel does while a cell runs."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(call_in_a_loop(work))
    finally:
        loop.close()


def run_in_asyncio_run(work: Callable[[], object]) -> None:
    asyncio.run(call_in_a_loop(work))


@pytest.mark.parametrize("run_on_loop", [run_in_notebook_loop, run_in_asyncio_run])
def test_an_interrupt_cancels_the_run_and_is_raised_after_its_cleanup(
    run_on_loop: Callable[[Callable[[], object]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    async def train() -> None:
        interrupt_soon()
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    def work() -> None:
        try:
            run_lockstep(train())
        except KeyboardInterrupt:
            events.append("interrupted")
            raise

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_on_loop(work)
    assert events == ["cancelled", "interrupted"]
    assert not any(thread.name == "tunesmith" for thread in threading.enumerate())
    assert signal.getsignal(signal.SIGINT) is before
    assert "SIGINT: ending the run" in capfd.readouterr().err


def test_an_interrupt_ends_a_run_that_has_no_event_loop_yet() -> None:
    def load() -> None:
        interrupt_soon()
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.01)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_notebook_loop(load)
    assert time.monotonic() - started < WAIT_S / 2


def test_a_second_interrupt_reaches_code_that_blocks_the_loop(interrupt_often: Callable[[int], None]) -> None:
    async def train() -> None:
        interrupt_often(2)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: ASYNC251 - it is to block

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_notebook_loop(lambda: run_lockstep(train()))
    assert time.monotonic() - started < WAIT_S / 2


def test_a_third_interrupt_leaves_a_thread_that_cannot_be_interrupted(interrupt_often: Callable[[int], None]) -> None:
    release = threading.Event()

    def work() -> None:
        interrupt_often(3)
        release.wait(WAIT_S)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_notebook_loop(work)
    assert time.monotonic() - started < WAIT_S / 2
    release.set()


def test_an_interrupt_is_raised_although_the_run_finished() -> None:
    async def train() -> int:
        interrupt_soon()
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            return 7
        raise AssertionError("the run was not cancelled")

    with pytest.raises(KeyboardInterrupt):
        run_in_notebook_loop(lambda: run_lockstep(train()))
