"""A lockstep run ends whatever user code does to the loop, to tasks and to threads; signals end it early."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tunesmith.config import RolloutSection
from tunesmith.engine.event_loop import shutdown as leftovers
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.event_loop.thread_calls import ThreadPool
from tunesmith.errors import RolloutError


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE_S", 0.1)


def test_a_thread_that_does_not_end_is_reported_and_left_running(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def search_forever() -> None:
        release.wait(60)

    async def run() -> int:
        asyncio.get_running_loop().run_in_executor(None, search_forever)
        threading.Thread(target=search_forever, name="mine").start()
        return 7

    started = time.monotonic()
    assert run_lockstep(run()) == 7
    assert time.monotonic() - started < 30
    release.set()
    assert "thread tunesmith-0 in" in caplog.text and "thread mine at" in caplog.text
    assert "test_lockstep_ends.py" in caplog.text and "in search_forever" in caplog.text


def test_a_task_that_suppresses_its_cancellation_is_reported_and_left_running(caplog: pytest.LogCaptureFixture) -> None:
    async def never_end() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def run() -> int:
        asyncio.get_running_loop().create_task(never_end(), name="stubborn")
        await asyncio.sleep(0)
        return 7

    assert run_lockstep(run()) == 7
    assert "stubborn, waiting at" in caplog.text and "in never_end" in caplog.text


def test_idle_threads_of_a_pool_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(2)

    async def run() -> int:
        await asyncio.to_thread(int)
        return await asyncio.get_running_loop().run_in_executor(pool, int)

    assert run_lockstep(run()) == 0
    assert not caplog.records


def test_a_process_exits_while_a_thread_still_runs() -> None:
    script = """
        import threading, time
        from tunesmith.runs import process
        process.EXIT_GRACE_S = 0.1
        threading.Thread(target=time.sleep, args=(1000,), name="mine").start()
        process.exit_despite_threads(SystemExit(0))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0
    assert "exiting while user code is still running: thread mine" in ended.stderr


def test_stopping_the_loop_raises_in_user_code() -> None:
    async def run() -> int:
        with pytest.raises(RuntimeError, match="cannot stop the event loop"):
            asyncio.get_running_loop().stop()
        return 7

    assert run_lockstep(run()) == 7


def test_cancelling_all_tasks_ends_the_run_and_reports_the_line() -> None:
    async def cancel_everything() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    async def run() -> None:
        await asyncio.gather(cancel_everything(), asyncio.sleep(60))

    with pytest.raises(RolloutError, match=r"cancelled tasks of the run, at .*ends.py:\d+ in cancel_every"):
        run_lockstep(run())


def test_system_exit_in_a_user_task_fails_its_awaiter_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        await asyncio.sleep(0)
        raise SystemExit(3)

    async def run() -> int:
        with pytest.raises(SystemExit):
            await asyncio.create_task(leave())
        return 7

    assert run_lockstep(run()) == 7
    assert "user code raised SystemExit" in caplog.text and "in leave" in caplog.text


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_signal_ends_the_run_after_cleanup(
    number: int,
    ending: type[BaseException],
    rank: int | None,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
    cleaned = []

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    before = signal.getsignal(number)
    with pytest.raises(ending) as caught:
        run_lockstep(run())
    assert cleaned
    assert signal.getsignal(number) is before
    assert ending is KeyboardInterrupt or caught.value.code == 143
    assert ("ending the run" in capfd.readouterr().err) == (rank != 1), "one line for all ranks"


def test_a_second_interrupt_reaches_code_that_blocks_the_loop() -> None:
    async def run() -> None:
        os.kill(os.getpid(), signal.SIGINT)  # handled before the call returns; two at the same time are one
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(60)  # noqa: ASYNC251 - it is to block

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_lockstep(run())
    assert time.monotonic() - started < 30


def test_a_keyboard_interrupt_raised_by_user_code_ends_the_run() -> None:
    async def interrupt() -> None:
        raise KeyboardInterrupt

    async def run() -> None:
        task = asyncio.create_task(interrupt())
        await asyncio.wait([task])

    with pytest.raises(KeyboardInterrupt):
        run_lockstep(run())


def test_there_are_max_concurrency_threads() -> None:
    together = threading.Barrier(40)

    async def run() -> None:
        await asyncio.gather(*(asyncio.to_thread(together.wait, 30) for _ in range(40)))

    run_lockstep(run(), RolloutSection(max_concurrency=40))


def test_threads_run_calls_in_order_and_propagate_errors() -> None:
    threads = ThreadPool(1)
    seen: list[int] = []
    futures = [threads.submit(seen.append, number) for number in range(20)]
    failing = threads.submit(lambda: 1 / 0)
    for future in futures:
        future.result(30)
    assert seen == list(range(20))
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
    threads.shutdown()
    with pytest.raises(RuntimeError, match="the run has ended"):
        threads.submit(int)
