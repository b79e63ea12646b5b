"""Ranks end with their launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conditions import wait_until

RANK = """
import time
from tunesmith.cluster.rank_errors import watch_launcher
watch_launcher()
print(1)
time.sleep(99)
"""
LAUNCHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-uc", sys.argv[1]]).pid, flush=True)
time.sleep(99)
"""


def test_a_rank_ends_when_its_launcher_is_killed():
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE, text=True)
    pid, ready = int(launcher.stdout.readline()), launcher.stdout.readline()
    assert ready.strip() == "1"
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:  # it has ended
        return False
