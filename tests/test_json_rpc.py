"""Servers that do not read, leave processes behind or never end a response: calls end in time, and `close` returns."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from conditions import wait_until
from tunesmith.errors import ServerLostError, ToolUnavailableError
from tunesmith.json_rpc import HttpServer, RpcError, ServerProcess

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
WRITES_NO_MESSAGES = """
import json, sys
for line in sys.stdin:
    for text in ("[" * 100_000 + "]" * 100_000, "{", "1" * 5000, "[]", "7", '{"id": []}', "\\udcff"):
        sys.stdout.buffer.write(text.encode(errors="surrogateescape") + b"\\n")
    print(json.dumps({"jsonrpc": "2.0", "id": json.loads(line)["id"], "result": 3}), flush=True)
"""
ECHO = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": message["params"]}), flush=True)
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
        except (TimeoutError, ToolUnavailableError, RpcError) as error:
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


def test_lines_that_are_no_messages_are_left_out():
    server = start(WRITES_NO_MESSAGES)
    assert [server.call("work", {}, timeout_s=END_S) for _ in range(2)] == [3, 3]
    server.close()


ANSWERS_IN_A_BATCH = """
import json, sys
for line in sys.stdin:
    number = json.loads(line)["id"]
    other = {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}
    print(json.dumps([other, {"jsonrpc": "2.0", "id": number, "result": 3}]), flush=True)
"""


def test_answers_in_a_batch_are_read_over_both_transports():
    process = start(ANSWERS_IN_A_BATCH)
    assert process.call("work", {}, timeout_s=END_S) == 3
    process.close()
    batch = [{"jsonrpc": "2.0", "method": "notifications/message"}, {"jsonrpc": "2.0", "id": 1, "result": 3}]
    with serve("text/event-stream", f"data: {json.dumps(batch)}\n\n".encode()) as (server, _):
        assert server.call("work", {}, timeout_s=END_S) == 3
    with (
        serve("text/event-stream", b"data: [3]\n\n") as (server, _),
        pytest.raises(ToolUnavailableError, match="no JSON"),
    ):
        server.call("work", {}, timeout_s=END_S)


def test_the_threads_of_a_server_end_with_it():
    before = set(threading.enumerate())
    server = start(BUSY)
    assert server.call("work", {}, timeout_s=END_S) > 0 and set(threading.enumerate()) - before
    server.close()
    wait_until(lambda: not set(threading.enumerate()) - before)


@contextmanager
def serve(content_type: str, part: bytes, status: int = 200) -> Iterator[tuple[HttpServer, threading.Event]]:
    """A server that answers each call with parts without end; and whether the client has closed such a response."""
    is_closed, is_over = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            is_call = "id" in message
            self.send_response(status if is_call else 202)
            self.send_header("content-type", content_type)
            self.end_headers()
            try:
                while is_call and not is_over.wait(0.05):
                    self.wfile.write(part)
            except OSError:
                is_closed.set()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield HttpServer(f"http://127.0.0.1:{server.server_port}", headers={}, label="the server"), is_closed
        finally:
            is_over.set()
            server.shutdown()


def test_a_lone_surrogate_arrives_over_both_transports():
    text = "smile \ud83d"
    process = start(ECHO)
    assert process.call("work", {"text": text}, timeout_s=END_S) == {"text": text}
    process.close()
    with serve("text/event-stream", b'data: {"id": 1, "result": 2}\n\n') as (server, _):
        assert run(server.call, "work", {"text": text}, timeout_s=END_S).result(END_S) == 2
        server.close()


def test_a_response_nested_too_deeply_is_no_json_rpc():
    with serve("text/event-stream", b"data: " + b"[" * 100_000 + b"\n\n") as (server, _):
        error = run(server.call, "work", {}, timeout_s=END_S).exception(END_S)
        assert isinstance(error, ToolUnavailableError) and "answered no JSON-RPC but '[[[" in str(error)
        server.close()


@pytest.mark.parametrize(
    ("content_type", "part", "status"),
    [
        ("text/event-stream", b": ping\r\n\r\n", 200),
        ("text/event-stream", b"x", 200),
        ("text/event-stream", b'data: {"method": "progress"}\n\n', 200),
        ("application/json", b" ", 200),
        ("text/html", b"x", 404),
    ],
)
def test_a_response_that_does_not_end_is_closed_in_time(content_type, part, status):
    with serve(content_type, part, status) as (server, is_closed):
        assert isinstance(run(server.call, "work", {}, timeout_s=1).exception(END_S), TimeoutError)
        assert is_closed.wait(END_S)
        server.close()
