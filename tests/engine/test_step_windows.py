"""Windows of engine steps: as many steps in each, whatever else the event loop does."""

from __future__ import annotations

import asyncio

from conditions import until
from tunesmith.engine.event_loop.clock import WINDOW_STEPS, LoopWindows, run_lockstep


class CountingEngine:
    """Has work for a number of steps."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return self.num_left > 0

    def step(self) -> None:
        self.num_left -= 1
        self.num_steps += 1


def test_engines_stop_after_each_window_and_report_once_when_they_have_no_work():
    async def run() -> list[tuple[int, bool]]:
        engine, ends = CountingEngine(2 * WINDOW_STEPS + 3), []
        windows = LoopWindows(
            lambda is_idle: ends.append((engine.num_steps, is_idle)), engines=[engine], has_windows=True
        )
        asyncio.get_running_loop().add_engine(engine)
        for number in range(3):
            windows.begin()
            await until(lambda number=number: len(ends) > number, interval_s=0.02)
        engine.num_left = 2
        await until(lambda: not engine.num_left, interval_s=0.02)
        windows.check_again()
        await until(lambda: len(ends) > 3, interval_s=0.02)
        windows.stop()
        engine.num_left = 5
        await asyncio.sleep(0.05)
        assert engine.num_left == 5, "no engine steps after stop"
        windows.release()
        await until(lambda: not engine.num_left, interval_s=0.02)
        return ends

    whole = 2 * WINDOW_STEPS + 3
    expected = [(WINDOW_STEPS, False), (2 * WINDOW_STEPS, False), (whole, True), (whole + 2, True)]
    assert run_lockstep(run()) == expected


def test_a_window_that_begins_within_the_report_of_the_last_one_is_whole():
    async def run() -> list[int]:
        engine, ends = CountingEngine(3 * WINDOW_STEPS), []

        def continue_at_once(is_idle: bool) -> None:
            ends.append(engine.num_steps)
            if not is_idle:
                windows.begin()

        windows = LoopWindows(continue_at_once, engines=[engine], has_windows=True)
        asyncio.get_running_loop().add_engine(engine)
        windows.begin()
        await until(lambda: not engine.num_left, interval_s=0.02)
        return ends

    assert run_lockstep(run()) == [WINDOW_STEPS, 2 * WINDOW_STEPS, 3 * WINDOW_STEPS]
