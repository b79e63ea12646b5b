"""While a device has work, a step waits for requests from sockets, but not longer than the device is busy."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

from tunesmith.config import RolloutSection
from tunesmith.engine.event_loop.clock import run_lockstep


class BusyDevice:
    """Implements `Steppable`: each step has waited `blocked_s` for the device."""

    def __init__(self, *, blocked_s: float, num_steps: int) -> None:
        self.blocked_s = blocked_s
        self.events: list[str] = []
        self.start(num_steps)

    def start(self, num_steps: int) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._num_left = num_steps

    @property
    def has_work(self) -> bool:
        return self._num_left > 0

    def step(self) -> None:
        self._num_left -= 1
        self.events.append("step")
        if not self._num_left:
            asyncio.get_running_loop().call_soon(self.done.set_result, None)


def test_a_request_that_arrives_while_the_device_is_busy_is_in_the_next_step():
    async def run() -> list[str]:
        device = BusyDevice(blocked_s=60.0, num_steps=2)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()

        def receive() -> None:
            device.events.append("request")
            loop.remove_reader(ours)

        with ours, theirs:
            loop.add_reader(ours, receive)
            loop.add_engine(device)
            threading.Timer(0.1, theirs.send, [b"a"]).start()
            await device.done
        return device.events

    assert run_lockstep(run(), RolloutSection()) == ["step", "request", "step"]


def test_without_sockets_a_step_waits_for_nothing():
    async def run() -> None:
        device = BusyDevice(blocked_s=60.0, num_steps=5)
        asyncio.get_running_loop().add_engine(device)
        await device.done

    started_at = time.monotonic()
    run_lockstep(run(), RolloutSection())
    assert time.monotonic() - started_at < 20


def test_a_device_without_work_has_no_slack_when_work_comes():
    async def run() -> float:
        device = BusyDevice(blocked_s=120.0, num_steps=1)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        with ours, theirs:
            loop.add_reader(ours, lambda: None)
            loop.add_engine(device)
            await device.done
            await asyncio.sleep(0.05)
            device.start(1)
            started_at = time.monotonic()
            await device.done
            loop.remove_reader(ours)
        return time.monotonic() - started_at

    assert run_lockstep(run(), RolloutSection()) < 20


def test_a_device_that_nothing_waited_for_has_no_slack():
    async def run() -> None:
        device = BusyDevice(blocked_s=0.0, num_steps=5)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        with ours, theirs:
            loop.add_reader(ours, lambda: None)
            loop.add_engine(device)
            await device.done
            loop.remove_reader(ours)

    run_lockstep(run(), RolloutSection())
