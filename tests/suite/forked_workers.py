"""`--workers N` runs the tests in N forks of the process that has collected them.

Importing torch, transformers and all test files takes longer than most files run; with workers that are started as
processes each of them would do it. A pipe holds the numbers of the files, longest first; a worker reads the next number
when it comes to the last test of its file, so that fixtures of the session and of packages are set up once in each
worker. Reports go to the first process, which prints and counts them as if it had run the tests.

A worker that dies fails the test that it was running and those of its file that it had not begun; the others continue.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

NUMBER_SIZE = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="number of processes that run tests; 0: this one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Hand the tests out, unless pytest would run none."""
    number = session.config.option.workers
    if number == 0 or session.config.option.collectonly or session.testsfailed:
        return None
    Workers(session).run(number)
    return True


class Workers:
    """The processes, from the side of the first one."""

    def __init__(self, session: pytest.Session) -> None:
        files: dict[Any, list[pytest.Item]] = {}
        for item in session.items:
            files.setdefault(item.path, []).append(item)
        self._files = list(files.values())
        self._session = session
        self._pids: dict[Connection, int] = {}
        self._running: dict[Connection, str] = {}
        self._queue, writer = os.pipe()
        os.write(writer, b"".join(index.to_bytes(NUMBER_SIZE, "big") for index in range(len(self._files))))
        os.close(writer)

    def run(self, number: int) -> None:
        left = {item.nodeid: item.location for item in self._session.items}
        if (reporter := self._session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
            reporter.showfspath = False  # tests of several files take turns
        for index in range(number):
            self._start(index)
        try:
            while self._pids:
                for connection in wait(list(self._pids)):
                    self._receive(connection, left)
                    if self._session.shouldfail:
                        raise self._session.Failed(self._session.shouldfail)
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for nodeid in list(left):
            self._fail(nodeid, "not run, since its worker ended", left)

    def _start(self, index: int) -> None:
        folder = self._session.config._tmp_path_factory.mktemp(f"worker-{index}", numbered=False)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            receiver.close()
            run_worker(self._session.config, self._read_files(), sender, folder)
        sender.close()
        self._pids[receiver] = pid

    def _read_files(self) -> Iterator[list[pytest.Item]]:
        """Take one file after the other from those that no worker has."""
        while number := os.read(self._queue, NUMBER_SIZE):
            yield self._files[int.from_bytes(number, "big")]

    def _receive(self, connection: Connection, left: dict[str, Any]) -> None:
        hook, config = self._session.config.hook, self._session.config
        try:
            kind, value = connection.recv()
        except EOFError:
            _, status = os.waitpid(self._pids.pop(connection), 0)
            connection.close()
            if status != 0:
                reason = f"the worker ended with status {os.waitstatus_to_exitcode(status)}"
                self._fail(self._running[connection], reason, left)
            return
        match kind:
            case "start":
                self._running[connection] = value["nodeid"]
                hook.pytest_runtest_logstart(**value)
            case "finish":
                left.pop(value["nodeid"])
                hook.pytest_runtest_logfinish(**value)
            case "report":
                hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=config, data=value))
            case "warning":
                message = warnings.WarningMessage(**value.pop("message"))
                hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **value})
            case "error":
                raise RuntimeError(f"a worker failed:\n{value}")

    def _fail(self, nodeid: str, reason: str, left: dict[str, Any]) -> None:
        report = pytest.TestReport(
            nodeid=nodeid, location=left.pop(nodeid), keywords={}, outcome="failed", longrepr=reason, when="call"
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)


class Reporter:
    """Sends what happens in a worker."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._connection.send(("start", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._connection.send(("finish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        message = {
            "message": f"{warning_message.category.__name__}: {warning_message.message}", "category": Warning,
            "filename": warning_message.filename, "lineno": warning_message.lineno,
        }  # fmt: skip
        self._connection.send(("warning", {"message": message, "when": when, "nodeid": nodeid, "location": location}))


def run_worker(config: pytest.Config, files: Iterator[list[pytest.Item]], connection: Connection, folder: Path) -> None:
    """Run files in a fork of the first process, with temporary files in the folder. Does not return."""
    status = 1
    try:
        start_captures(config)
        config.pluginmanager.register(Reporter(config, connection))
        config._tmp_path_factory._basetemp = folder
        items = next(files, None)
        while items is not None:
            following = None
            for item, after in zip(items, [*items[1:], None], strict=True):
                if after is None:
                    following = next(files, None)
                    after = following[0] if following is not None else None
                config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            items = following
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:  # noqa: BLE001 - the first process raises it
        connection.send(("error", traceback.format_exc()))
    os._exit(status)


def start_captures(config: pytest.Config) -> None:
    """Capture output in files of the worker's own, and print nothing: the first process does."""
    manager = config.pluginmanager.get_plugin("capturemanager")
    manager.stop_global_capturing()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    manager.start_global_capturing()
    manager.suspend_global_capture(in_=False)
