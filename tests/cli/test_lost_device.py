"""A command whose device is lost reports it and exits at once, without cleanup that could abort."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import atexit
    from tunesmith.cli import run_guarded
    from tunesmith.errors import TrainingError
    from tunesmith.model.device_errors import explain_device_error

    def work():
        print("before the failure")
        error = RuntimeError({message!r})
        raise TrainingError(explain_device_error(error, work="an update", advice="lower it")) from error

    atexit.register(print, "cleaned up")
    run_guarded(work, is_debug=False)
    """
)


def run(message: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(message=message)], capture_output=True, text=True, check=False
    )


def test_a_lost_device_ends_the_process_at_once_with_status_1_and_its_message():
    result = run("CUDA error: device-side assert triggered")
    assert result.returncode == 1
    assert result.stdout == "before the failure\n"
    assert (
        "device-side assert triggered; the device can no longer be used by this process: restart the run"
        in result.stderr
    )


def test_other_failures_exit_normally():
    result = run("out of patience")
    assert result.returncode == 1
    assert result.stdout == "before the failure\ncleaned up\n"
