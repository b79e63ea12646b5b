"""The terminal summary lists the tests that did not run, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = "pytester"
CONFTEST = Path(__file__).parent / "skip_summary.py"
SKIPPING = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_with_a_peer(number):
    pytest.importorskip("no_such_peer")

@pytest.mark.gpu
def test_on_a_device():
    pytest.skip("needs a CUDA device")

def test_that_runs():
    pass
"""


def test_skipped_tests_are_counted_by_reason(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    gpu: needs a device\n")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        test_one=SKIPPING, test_two=SKIPPING, test_three='import pytest\npytest.importorskip("no_such_engine")'
    )
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, skipped=9)
    result.stdout.fnmatch_lines(
        [
            "*not run*",
            "   6  could not import 'no_such_peer'*: test_one.py x 3, test_two.py x 3",
            "   2  needs a CUDA device: test_one.py, test_two.py",
            "   1  could not import 'no_such_engine'*: test_three.py (whole)",
        ]
    )


def test_a_complete_run_has_no_summary_section(pytester):
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile("def test_that_runs():\n    pass\n")
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*not run*")


def test_deselected_tests_are_counted(pytester):
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile("def test_one():\n    pass\n\ndef test_two():\n    pass\n")
    result = pytester.runpytest("-p", "no:cacheprovider", "-k", "one")
    result.stdout.fnmatch_lines(["*not run*", "   1  deselected by -m or -k"])
