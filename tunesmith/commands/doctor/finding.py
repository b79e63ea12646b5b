"""Results of checks: a finding (something is wrong), a figure within its limits, and the diagnosis of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tunesmith.monitor.metrics_log import Series
from tunesmith.runs.record import RunState

Severity = Literal["error", "warning", "note"]
"""error: the run stopped or cannot learn; warning: it learns less, slower or something else than it could; note: worth
knowing, nothing may have to change."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation that supports a finding."""

    source: str
    """A metric's name, or the path of a file in the run folder."""
    observed: str
    value: float | None = None
    """The number in `observed`, if there is one."""
    steps: tuple[int, int] | None = None
    """First and last step of the observation."""

    def __str__(self) -> str:
        if self.steps is None:
            return f"{self.source}: {self.observed}"
        first, last = self.steps
        return f"{self.source}: {self.observed}, " + (f"step {first}" if first == last else f"steps {first}-{last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """Something that is wrong with a run."""

    check: str = ""
    """Name of the check; its table gives it."""
    severity: Severity = "warning"
    problem: str
    """What is wrong, in one sentence."""
    evidence: tuple[Evidence, ...]
    change: str
    """What to change, in one sentence."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Suggested knobs of the run file and their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A check without a finding, and the figure that it looked at."""

    check: str
    figure: str


Outcome = CheckFinding | str | None
"""Result of a check: what is wrong, or the figure that is within its limits, or None if it does not apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that `tunesmith doctor` says about a run."""

    folder: Path
    state: RunState
    num_steps: int
    """The last step with metrics."""
    total_steps: int | None
    """Steps that the run was to make; None if that depends on the size of the data set."""
    findings: tuple[CheckFinding, ...]
    """Most severe first."""
    passed: tuple[Passed, ...]
    not_checked: tuple[str, ...]
    """Names of checks that do not apply, or whose metrics are not recorded."""
    step_time: str | None
    """Where the time of a step goes; None if it is not recorded."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder)}

    def __str__(self) -> str:
        return format_diagnosis(self)


def observe(series: Series, observed: str, value: float | None = None) -> Evidence:
    """Evidence from a metric; its value is the mean if no other is given."""
    return Evidence(
        source=series.name, observed=observed, value=series.mean if value is None else value, steps=series.span
    )


def format_settings(settings: Mapping[str, object]) -> str:
    """Knobs and values as in `--set`."""
    return " and ".join(
        f"{knob}={value:.2g}" if isinstance(value, float) else f"{knob}={value}" for knob, value in settings.items()
    )


def name_findings(outcomes: Mapping[str, Outcome]) -> tuple[CheckFinding, ...]:
    """The findings with the names of their checks, most severe first."""
    found = [replace(each, check=name) for name, each in outcomes.items() if isinstance(each, CheckFinding)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def format_findings(findings: Sequence[CheckFinding], *, otherwise: str) -> list[str]:
    """The lines of all findings, or the line `otherwise`."""
    lines: list[str] = []
    for finding in findings:
        lines += ["", f"{finding.severity}: {finding.check}: {finding.problem}"]
        lines += [f"  evidence: {each}" for each in finding.evidence]
        lines.append(f"  change: {finding.change}")
    return lines or ["", otherwise]


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """The diagnosis as text."""
    steps = f"{diagnosis.num_steps} steps" if diagnosis.num_steps != 1 else "1 step"
    if diagnosis.total_steps is not None and diagnosis.num_steps < diagnosis.total_steps:
        steps = f"{diagnosis.num_steps} of {diagnosis.total_steps} steps"
    lines = [f"{diagnosis.folder}: {diagnosis.state}, {steps}"]
    if diagnosis.step_time is not None:
        lines.append(f"time of a step: {diagnosis.step_time}")
    lines += format_findings(diagnosis.findings, otherwise="no finding")
    if diagnosis.passed:
        lines += ["", "checked and within limits:"]
        lines += [f"  {each.check}: {each.figure}" for each in diagnosis.passed]
    if diagnosis.not_checked:
        lines += ["", f"not checked (not recorded, or of no use in this run): {', '.join(diagnosis.not_checked)}"]
    return "\n".join(lines)
