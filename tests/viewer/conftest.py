"""One run folder for all tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from viewer_runs import write_run

from tunesmith.viewer.answers.table import Answers
from tunesmith.viewer.reading.run import Run, open_runs


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "sums")


@pytest.fixture
def run(run_folder: Path) -> Run:
    return open_runs([run_folder])[0]


@pytest.fixture
def answers(run: Run) -> Answers:
    return Answers([run])
