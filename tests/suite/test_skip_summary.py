"""The terminal summary lists the tests that did not run, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from conditions import REQUIRED, skip_without

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


def test_long_lists_are_cut(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    gpu: needs a device\n")
    pytester.makeconftest(CONFTEST.read_text())
    own = """
        import pytest

        @pytest.mark.parametrize("number", range(3))
        def test_with_a_reason(number):
            pytest.skip(f"page {number}")
        """
    pytester.makepyfile(**dict.fromkeys([f"test_{name}" for name in "abcdef"], SKIPPING), test_pages=own)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(
        [
            "  18  could not import 'no_such_peer'*: test_a.py x 3, test_b.py x 3, *, test_d.py x 3 and 2 more",
            "   3  for a reason of its own each (pytest -rs): test_pages.py x 3",
        ]
    )


def test_what_must_work_here_fails_instead_of_being_skipped(monkeypatch):
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no user namespaces"):
        skip_without("bubblewrap", "no user namespaces")
    monkeypatch.setenv(REQUIRED, "site bubblewrap")
    with pytest.raises(pytest.fail.Exception, match="names bubblewrap: no user namespaces"):
        skip_without("bubblewrap", "no user namespaces")
