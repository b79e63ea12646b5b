"""The result of `select_model`, and its built-in judges, by time and by tokens.

The arguments of the judges are those of AgentScope's judges: a task, which is not used, and the response with the
metrics of the run, `{"response": ..., "metrics": {"execution_time": ..., "total_tokens": ...}}`. A higher reward is
better, so the reward is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tunesmith.commands.eval.comparison import format_table
from tunesmith.commands.eval.sample_scores import Difference, Interval
from tunesmith.types import JudgeOutput

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScore:
    """One candidate on the tasks of the selection."""

    label: str
    model: Any
    """The candidate as it was passed."""
    reward: float | None
    """Mean over the compared tasks; None for a candidate that is not eligible."""
    interval: Interval | None
    """95 % bootstrap interval of the mean over tasks."""
    num_tasks: int
    num_scored: int
    """Tasks without a failure."""
    causes: tuple[str, ...]
    """The most frequent failures."""
    metrics: Mapping[str, float]
    """`<metric>_avg` of the workflow and the judge, of time and of tokens, over the scored tasks."""
    lead: Difference | None = None
    """Paired difference, best minus this candidate; None for the best and for one that is not eligible."""

    @property
    def num_failures(self) -> int:
        return self.num_tasks - self.num_scored


class ModelSelection(tuple[Any, dict[str, float]]):
    """The best model and its metrics, as a pair, with the scores of all candidates."""

    candidates: tuple[CandidateScore, ...]
    """In the order in which they were passed."""
    num_compared: int
    """Tasks that every eligible candidate was scored on; the rewards are means over them."""

    @classmethod
    def build(cls, best: CandidateScore, candidates: Sequence[CandidateScore], *, num_compared: int) -> Self:
        result = cls((best.model, dict(best.metrics)))
        result.candidates, result.num_compared = tuple(candidates), num_compared
        return result

    @property
    def model(self) -> Any:
        """The best model, as it was passed."""
        return self[0]

    @property
    def metrics(self) -> dict[str, float]:
        """`<metric>_avg` of the best model."""
        return self[1]

    def format_table(self) -> str:
        """A row per candidate, aligned for a terminal; Markdown."""
        head = ["model", "reward (95 % interval)", "behind the best (p)", "failed", "first cause"]
        return format_table(head, [self._format_row(each) for each in self.candidates])

    def _format_row(self, each: CandidateScore) -> list[str]:
        is_best = each.reward is not None and each.lead is None
        reward = "not eligible"
        if each.reward is not None and each.interval is not None:
            reward = f"{each.reward:.4g} ({each.interval[0]:.4g} to {each.interval[1]:.4g})"
        behind = "best" if is_best else ""
        if each.lead is not None:
            behind = f"{each.lead.mean:.4g} ({each.lead.p_value:.2g})"
        cause = each.causes[0].replace("|", "/") if each.causes else ""
        return [each.label, reward, behind, f"{each.num_failures} of {each.num_tasks}", cause]

    def to_pandas(self) -> DataFrame:
        """A row per candidate: label, reward, interval, tasks, failures, and its metrics."""
        from pandas import DataFrame  # half a second to import

        rows = [
            {"model": each.label, "reward": each.reward, "num_tasks": each.num_tasks, "num_failures": each.num_failures}
            | {"low": each.interval and each.interval[0], "high": each.interval and each.interval[1]}
            | dict(each.metrics)
            for each in self.candidates
        ]
        return DataFrame(rows)


async def avg_time_judge(_task: dict[str, Any], response: Any) -> JudgeOutput:
    """Reward: minus the seconds that the workflow took, `metrics["execution_time"]`."""
    seconds = read_metrics(response).get("execution_time")
    if seconds is None:
        raise ValueError("Missing 'execution_time' field in metrics")
    return JudgeOutput(reward=-seconds, metrics={"avg_time_seconds": seconds})


async def avg_token_consumption_judge(_task: dict[str, Any], response: Any) -> JudgeOutput:
    """Reward: minus the tokens that the workflow used, `metrics["total_tokens"]`, or those of `metrics["usage"]`."""
    metrics = read_metrics(response)
    usage = metrics.get("usage", metrics)
    if not isinstance(usage, Mapping):
        raise ValueError("Usage field in response.metrics is not a dictionary")
    counts = [usage[name] for name in ("total_tokens", "output_tokens") if usage.get(name) is not None]
    if not counts:
        raise ValueError(
            "the tokens of the run are unknown: the model's replies state no usage, or the workflow calls the model "
            "in another way than model(...)"
        )
    return JudgeOutput(reward=-float(counts[0]), metrics={"token_consumed": float(counts[0])})


def read_metrics(response: Any) -> Mapping[str, Any]:
    if not isinstance(response, Mapping):
        raise ValueError("Response must be a dict with 'response' and 'metrics' keys")
    metrics = response.get("metrics")
    if metrics is None:
        raise ValueError("Missing 'metrics' field in response")
    return dict(metrics)
