"""A signal ends a command also where Python drops the exception of its handler."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time, weakref
from tunesmith.runs.process import run_guarded

class Thing:
    pass

def interrupt(_):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    for _ in range(10):
        time.sleep(0)

def work():
    thing = Thing()
    reference = weakref.ref(thing, interrupt)
    del thing
    for _ in range(200):
        time.sleep(0.1)
    print("it runs on")

run_guarded(work, is_debug=False)
"""


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", -2)])
def test_a_signal_during_the_callback_of_a_weak_reference_ends_the_command(name, status):
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "it runs on" not in done.stdout
