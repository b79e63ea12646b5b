"""An answer that came within its time limit counts, however late a busy machine lets its reader run."""

from __future__ import annotations

import itertools
import os
import socket
import threading

import pytest

from tunesmith.config import PythonToolSection
from tunesmith.tools.python.call import Call, Child, Control
from tunesmith.tools.python.child import OK, READY
from tunesmith.tools.python.folder import SandboxFolder
from tunesmith.tools.python.worker import CONTINUE, DONE, STOP, Report


def answer_command(far):
    if far.recv(1) == CONTINUE:
        assert far.recv(1) == STOP
    else:
        far.sendall(bytes(Report(kind=DONE)))


@pytest.mark.parametrize("is_session", [False, True])
def test_an_answer_is_read_before_the_time_is_looked_at(tmp_path, is_session):
    """This test is the worker and the code; the clock says that the limit is long past."""
    near, far = socket.socketpair()
    with near, far:
        control = Control(near, timeout_s=10)
        child = Child(control)
        _, files, _, _ = socket.recv_fds(far, 1, 4)
        _, stdout, _, status = files
        clock = itertools.chain([0.0, 0.0], itertools.repeat(1000.0))
        call = Call(
            child, control, "print(42)", PythonToolSection(wall_s=1), folder=SandboxFolder(str(tmp_path), max_mb=None),
            is_session=is_session, clock=lambda: next(clock),
        )  # fmt: skip
        os.write(stdout, b"42")
        os.write(status, READY + call.number + OK)
        worker = threading.Thread(target=answer_command, args=(far,))
        worker.start()
        answer = call.run(start_timeout_s=10)
        worker.join()
        assert (answer.outcome, answer.stdout) == ("ok", "42")
        child.close()
        for fd in files:
            os.close(fd)
