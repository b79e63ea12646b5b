"""What `tunesmith check` found: the samples of one rollout, its reward, and the problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tunesmith.commands.doctor.finding import Finding, format_findings


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens of a sample with the same mask."""

    is_sampled: bool
    """Whether the model sampled these tokens, so that they are trained; the others are context."""
    num_tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSample:
    """One training sample: turns of the rollout that extend each other."""

    spans: tuple[TokenSpan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans if span.is_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowCheck:
    """All that `tunesmith check` says about a workflow."""

    task_id: str
    model: str
    num_turns: int
    samples: tuple[CheckedSample, ...]
    """Samples of the first of the two runs; they would be trained if it has a reward."""
    reward: float | None
    """None if the rollout failed: nothing of it would be trained."""
    metrics: Mapping[str, float]
    response_text: str
    seconds: float
    """Time of the first run."""
    findings: tuple[Finding, ...]
    """Most severe first."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return format_check(self)


def format_check(check: WorkflowCheck) -> str:
    """The check as text: the samples with their masks, the reward, the findings."""
    lines = [f"task {check.task_id}, model {check.model}: {check.num_turns} turns in {check.seconds:.1f} s"]
    for number, sample in enumerate(check.samples, start=1):
        lines += ["", f"sample {number}: {sample.num_tokens} tokens, {sample.num_sampled_tokens} sampled by the model"]
        for span in sample.spans:
            lines.append(f"--- {'sampled' if span.is_sampled else 'context'}, {span.num_tokens} tokens")
            lines.append(span.text)
    is_trained = check.reward is not None
    lines += ["", f"response: {check.response_text}", f"reward: {check.reward if is_trained else 'none'}"]
    lines += [f"metric {name}: {value:g}" for name, value in check.metrics.items()]
    num_trained = sum(sample.num_sampled_tokens for sample in check.samples) if is_trained else 0
    lines.append(f"tokens that would be trained: {num_trained}")
    return "\n".join(lines + format_findings(check.findings, otherwise="no problem found"))
