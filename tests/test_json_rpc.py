"""Servers that do not read, or leave processes behind: calls end at their time limit, and `close` returns."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from conditions import wait_until
from tunesmith.errors import ServerLostError
from tunesmith.json_rpc import RpcError, ServerProcess

LARGE = "x" * 200_000
"""More than a pipe holds."""
END_S = 30.0
"""Seconds after which something hangs."""
BUSY = """
import json, sys, time
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "compute":
        time.sleep(message["params"]["seconds"])
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": len(line)}), flush=True)
"""
LEAVES_A_PROCESS = """
import json, subprocess, sys
message = json.loads(sys.stdin.readline())
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": child.pid}), flush=True)
sys.stdin.read()
"""
CLOSES_ITS_INPUT = """
import json, os, sys, time
message = json.loads(sys.stdin.readline())
os.close(0)
print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": 0}), flush=True)
time.sleep(600)
"""


def start(program: str) -> ServerProcess:
    return ServerProcess([sys.executable, "-I", "-S", "-c", program], label="the server")


def run(function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """The end of a function in a thread that no test waits for when it hangs."""
    ended: Future[Any] = Future()

    def work() -> None:
        try:
            ended.set_result(function(*args, **options))
        except (TimeoutError, ServerLostError, RpcError) as error:
            ended.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return ended


def test_calls_of_a_server_that_does_not_read_end_in_time_and_so_does_close():
    server = start(BUSY)
    small = run(server.call, "compute", {"seconds": 600}, timeout_s=1)
    large = [run(server.call, "compute", {"seconds": 0, "text": LARGE}, timeout_s=1) for _ in range(2)]
    for each in (small, *large):
        assert isinstance(each.exception(END_S), TimeoutError)
    waiting = run(server.call, "work", {}, timeout_s=None)
    run(server.close).result(END_S)
    assert isinstance(waiting.exception(END_S), ServerLostError)
    with pytest.raises(ServerLostError, match="the server is closed"):
        server.notify("work", {})


def test_a_server_that_reads_again_gets_every_message_whole():
    server = start(BUSY)
    with pytest.raises(TimeoutError):
        server.call("compute", {"seconds": 1.5}, timeout_s=0.01)
    calls = [run(server.call, "work", {"text": LARGE[number:]}, timeout_s=END_S) for number in range(5)]
    assert [each.result(END_S) + number for number, each in enumerate(calls)] == [calls[0].result(END_S)] * 5
    run(server.close).result(END_S)


def test_close_returns_while_another_process_has_the_output_of_the_server():
    server = start(LEAVES_A_PROCESS)
    left = server.call("start", {}, timeout_s=END_S)
    try:
        run(server.close).result(END_S)
        with pytest.raises(ServerLostError, match="the server is closed"):
            server.call("work", {}, timeout_s=END_S)
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_server_that_closes_its_input_is_lost(monkeypatch):
    monkeypatch.setattr("tunesmith.json_rpc.END_TIMEOUT_S", 0.1)
    server = start(CLOSES_ITS_INPUT)
    server.call("start", {}, timeout_s=END_S)
    error = run(server.call, "work", {}, timeout_s=None).exception(END_S)
    assert isinstance(error, ServerLostError) and str(error).startswith("the server has ended (status -9)")


def test_the_threads_of_a_server_end_with_it():
    before = set(threading.enumerate())
    server = start(BUSY)
    assert server.call("work", {}, timeout_s=END_S) > 0 and set(threading.enumerate()) - before
    server.close()
    wait_until(lambda: not set(threading.enumerate()) - before)
