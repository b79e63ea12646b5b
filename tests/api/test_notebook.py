"""`tune` in a loop that already runs, as in a notebook's cell: an interrupt ends the run, and the next call works."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
from user_functions import ask, judge

from tunesmith import tune
from tunesmith.monitor.metrics_file import load_metrics

STEPS_OF_HOURS = 1_000_000
WAIT_S = 120.0


def interrupt_after_steps(path, num_steps):
    """Send Ctrl-C once the run has logged some steps."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and len(load_metrics(path)) < num_steps:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_cell_ends_its_run_and_the_next_one_trains(config, tmp_path, capfd):
    long = config.model_copy(
        update={
            "name": "long",
            "total_steps": STEPS_OF_HOURS,
            "eval_datasets": {},
        }
    )
    metrics = tmp_path / "runs" / "tunesmith" / "long" / "metrics.jsonl"

    async def run_cell(cell, *overrides):
        return tune(cell, workflow_func=ask, judge_func=judge, overrides=overrides)

    loop = asyncio.new_event_loop()  # unlike asyncio.run, it leaves Python's SIGINT handler in place, as a kernel does
    try:
        threading.Thread(target=interrupt_after_steps, args=(metrics, 2), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(run_cell(long))
        num_steps = len(load_metrics(metrics))
        assert (metrics.parent / f"global_step_{num_steps}").is_dir() and 2 <= num_steps < STEPS_OF_HOURS
        printed = capfd.readouterr().err
        assert "finishing and saving this step" in printed and "interrupted; the last checkpoint is" in printed
        assert not any(thread.name == "tunesmith" for thread in threading.enumerate())
        assert loop.run_until_complete(run_cell(config, "name=after", "total_steps=1")).num_steps == 1
    finally:
        loop.close()
