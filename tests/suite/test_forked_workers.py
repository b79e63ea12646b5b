"""Tests run in forks of the process that collected them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = "pytester"
PLUGIN = Path(__file__).parent / "forked_workers.py"
COUNTED = """
import os
from pathlib import Path

import pytest

@pytest.fixture(scope="session")
def counted():
    yield
    with Path("ended").open("a") as file:
        file.write(f"{os.getpid()}\\n")

@pytest.fixture(autouse=True)
def noted(request, counted):
    with Path("ran").open("a") as file:
        file.write(f"{os.getpid()} {request.path.name}\\n")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run tests of four files in two workers, in a process of their own."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take longer than the tests

    def run_files(text: str, *options: str) -> pytest.RunResult:
        pytester.makeconftest(PLUGIN.read_text() + COUNTED)
        pytester.makepyfile(**{f"test_{name}": text for name in "abcd"})
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--workers", "2", *options)

    return run_files


def read_lines(pytester, name: str) -> list[list[str]]:
    return [line.split() for line in (pytester.path / name).read_text().splitlines()]


def test_results_warnings_and_output_are_those_of_one_process(run, pytester):
    result = run(
        """
        import warnings
        import pytest

        @pytest.mark.parametrize("number", range(3))
        def test_that_passes(number, tmp_path):
            (tmp_path / "file").touch(exist_ok=False)

        def test_that_fails():
            print("printed before")
            assert 1 == 2

        def test_that_is_skipped():
            pytest.skip("no device")

        @pytest.mark.xfail
        def test_that_may_fail():
            assert False

        def test_that_warns():
            warnings.warn("be careful")

        @pytest.fixture
        def broken():
            raise ValueError("broken fixture")

        def test_with_a_broken_fixture(broken):
            pass
        """
    )
    result.assert_outcomes(passed=16, failed=4, skipped=4, xfailed=4, errors=4, warnings=4)
    result.stdout.fnmatch_lines(["*printed before*", "*UserWarning: be careful*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_file_is_run_by_one_worker_and_fixtures_of_the_session_end_once_in_each(run, pytester):
    result = run("import time\ndef test_one():\n    time.sleep(0.05)\ndef test_two():\n    time.sleep(0.05)")
    result.assert_outcomes(passed=8)
    workers = {}
    for pid, name in read_lines(pytester, "ran"):
        workers.setdefault(name, set()).add(pid)
    assert [len(pids) for pids in workers.values()] == [1, 1, 1, 1]
    assert sorted(read_lines(pytester, "ended")) == sorted([pid] for pid in set.union(*workers.values()))


def test_a_worker_that_dies_fails_its_file_and_the_others_continue(run):
    result = run(
        """
        import os, signal

        def test_before():
            pass

        def test_that_kills():
            if __name__ == "test_a":
                os.kill(os.getpid(), signal.SIGKILL)

        def test_after():
            pass
        """,
        "-rf",
    )
    result.assert_outcomes(passed=10, failed=2)
    result.stdout.fnmatch_lines(
        [
            "FAILED test_a.py::test_that_kills - *the worker ended with status -9*",
            "FAILED test_a.py::test_after - *not run, since its worker ended*",
        ]
    )


def test_the_run_stops_at_the_first_failure_if_told_to(run, pytester):
    result = run("import time\ndef test_one():\n    assert 0\ndef test_two():\n    time.sleep(1000)", "-x")
    assert result.parseoutcomes() == {"failed": 1}
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_an_error_of_collection_runs_no_test(run, pytester):
    result = run("import no_such_package\ndef test_one():\n    pass")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not (pytester.path / "ran").exists()
