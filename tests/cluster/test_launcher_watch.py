"""Ranks end with their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from conditions import HANG_S, wait_until
from free_ports import find_free_port
from tunesmith.cluster import process_group
from tunesmith.cluster.rank_info import LAUNCHED, TORCHRUN, WATCH_NAME, RankInfo, watch_launcher
from tunesmith.errors import ConfigError

RANK = """
import os, time
from tunesmith.cluster.rank_info import TORCHRUN, watch_launcher
os.environ[TORCHRUN] = "x"
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


def test_a_rank_ends_when_its_launcher_was_killed_before_the_watch_began():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    rank = subprocess.run(
        [sys.executable, "-c", RANK], env=os.environ | {LAUNCHED: str(gone.pid)}, timeout=HANG_S, check=False
    )
    assert rank.returncode == -signal.SIGTERM


def test_a_process_that_no_launcher_started_is_not_watched(monkeypatch):
    monkeypatch.delenv(TORCHRUN, raising=False)
    watch_launcher()
    assert WATCH_NAME not in [thread.name for thread in threading.enumerate()]


def test_a_rank_does_not_wait_for_its_timeout_where_the_store_of_its_launcher_is_gone(monkeypatch):
    port = find_free_port()
    monkeypatch.setattr(process_group, "STORE_TIMEOUT_S", 0.5)
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(port))
    place = RankInfo(rank=1, world_size=2, local_size=2, address=f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="rank 1 of 2 cannot join the others"):
        process_group.open_ranks(place, device=torch.device("cpu"), timeout_s=3600).__enter__()


LEAVES = """
import os, sys, torch
from tunesmith.cluster.process_group import open_ranks
from tunesmith.cluster.rank_info import RankInfo
from tunesmith.errors import RankError
rank = int(sys.argv[1])
try:
    with open_ranks(RankInfo(rank=rank, world_size=2), device=torch.device("cpu"), timeout_s=60) as ranks:
        ranks.all_gather_objects(rank)
        if rank == 1:
            os._exit(1)
except RankError as error:
    print(error)
"""


def test_a_rank_that_is_lost_while_the_others_end_is_named_as_one():
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = [
        subprocess.Popen([sys.executable, "-c", LEAVES, str(rank)], env=os.environ | place, stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    shown = ranks[0].communicate(timeout=HANG_S)[0].decode()
    ranks[1].communicate(timeout=HANG_S)
    assert "another rank has ended" in shown
