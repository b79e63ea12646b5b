"""A section of pytest's terminal summary: which tests did not run, and why."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

NUM_FILES = 4
"""Files that are named for a reason."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List skipped tests by reason and file; a file that is skipped as a whole counts as one.

    Tests of one file that have a reason each share a line; `pytest -rs` lists every test.
    """
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        is_whole = isinstance(report, pytest.CollectReport)
        files[reason.removeprefix("Skipped: ")][f"{report.nodeid.split('::')[0]}{' (whole)' if is_whole else ''}"] += 1
    num_deselected = len(terminalreporter.stats.get("deselected", []))
    if not files and not num_deselected:
        return
    single = Counter(name for counts in files.values() if counts.total() == 1 for name in counts)
    for reason in [reason for reason, counts in files.items() if counts.total() == 1]:
        (name,) = files[reason]
        if single[name] > 2:
            del files[reason]
            files["for a reason of its own each (pytest -rs)"][name] += 1
    terminalreporter.section("not run")
    for reason, counts in sorted(files.items(), key=lambda item: (-item[1].total(), item[0])):
        names = [name if number == 1 else f"{name} x {number}" for name, number in sorted(counts.items())]
        where = ", ".join(names[:NUM_FILES]) + (f" and {len(names) - NUM_FILES} more" if len(names) > NUM_FILES else "")
        terminalreporter.line(f"{counts.total():4d}  {reason}: {where}")
    if num_deselected:
        terminalreporter.line(f"{num_deselected:4d}  deselected by -m or -k")
