"""What every test runs under: one torch thread, no network, property tests that repeat, no GPU test without a GPU.

A run ends with lines that say which tests were skipped, grouped by the reason.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("tunesmith", deadline=None, derandomize=True, max_examples=30, print_blob=True)
hypothesis.settings.load_profile("tunesmith")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which groups of tests were skipped and why; a file that is skipped as a whole counts as one."""
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


@pytest.fixture(scope="session")
def pocket_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The pocket model, untrained, as a folder."""
    from tunesmith.model.prepare import prepare_model

    return str(prepare_model("pocket", tmp_path_factory.mktemp("models") / "pocket"))
