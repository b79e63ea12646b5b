"""What one thread prints is silenced, and nothing else."""

from __future__ import annotations

import sys
import threading

from tunesmith.environments.sets.random_state import silence


def talk(name):
    print(f"{name} out")
    print(f"{name} err", file=sys.stderr)


def test_only_the_given_thread_is_silenced_and_only_within(capsys):
    before = sys.stdout, sys.stderr
    thread, other = threading.Thread(target=talk, args=["silent"]), threading.Thread(target=talk, args=["other"])
    with silence(thread):
        for each in (thread, other):
            each.start()
            each.join()
        talk("main")
        assert sys.stdout.isatty() == before[0].isatty()
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("other out\nmain out\n", "other err\nmain err\n")
