"""Small runs of the untrained pocket model."""

from __future__ import annotations

import pytest
from write_failing_runs import Start

from tunesmith.commands.doctor.diagnose import diagnose


@pytest.fixture
def run(tmp_path, pocket_folder):
    """Calls tune() with small settings; returns the diagnosis, also of a run that stops with an error."""

    def call(*overrides, **arguments):
        start = Start(tmp_path, pocket_folder, "x")
        start(*overrides, **arguments)
        return diagnose(start.root)

    return call
