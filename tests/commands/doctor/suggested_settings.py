"""Whether the knobs that a finding suggests are accepted by the config of its run."""

from __future__ import annotations

import json

from tunesmith.commands.doctor.record import CheckFinding
from tunesmith.config import Section
from tunesmith.runs.load_config import load_section


def check_settings(finding: CheckFinding, config: Section) -> None:
    """Each knob stands in the sentence of the change, and the config with all of them is valid."""
    assert all(knob.split(".")[-1] in finding.change for knob in finding.settings), finding
    overrides = [f"{knob}={json.dumps(value)}" for knob, value in finding.settings.items()]
    load_section(type(config), None, overrides, values=config.model_dump(mode="json"))
