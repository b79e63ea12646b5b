"""A section of pytest's terminal summary: which tests did not run, and why."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List skipped tests by reason and file; a file that is skipped as a whole counts as one."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        is_whole = isinstance(report, pytest.CollectReport)
        files[reason.removeprefix("Skipped: ")][f"{report.nodeid.split('::')[0]}{' (whole)' if is_whole else ''}"] += 1
    num_deselected = len(terminalreporter.stats.get("deselected", []))
    if not files and not num_deselected:
        return
    terminalreporter.section("not run")
    for reason, counts in sorted(files.items(), key=lambda item: (-item[1].total(), item[0])):
        where = ", ".join(name if number == 1 else f"{name} x {number}" for name, number in sorted(counts.items()))
        terminalreporter.line(f"{counts.total():4d}  {reason}: {where}")
    if num_deselected:
        terminalreporter.line(f"{num_deselected:4d}  deselected by -m or -k")
