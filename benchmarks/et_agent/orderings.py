"""The orderings of ET-Agent's paper on the results of et_agent.py, each with an interval and a verdict.

A difference is paired by question: the mean over the rollouts of one model minus that of another on the same question
of the same seed. Intervals are 95 % percentile bootstrap intervals over the questions of all seeds, so they do not
cover what another seed of training would change; therefore each ordering also counts the seeds on its side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from tunesmith.commands.eval.sample_scores import compute_bootstrap_interval
from tunesmith.et_agent.radar import AXES, Radar

Questions = Mapping[str, Mapping[str, Mapping[str, Sequence[float | None]]]]
"""Seed -> model -> quantity -> the value of each question; None where it is not defined."""
Verdict = Literal["holds", "does not hold", "undecided"]
QUANTITIES = ("accuracy", "efficiency", "successful_execution", "reasoning_length", "tool_calls", "spread")
NO_LOSS = 0.02
"""An accuracy lower by less than this counts as no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """The claim that a model has more of a quantity than another."""

    claim: str
    low: str
    high: str
    quantity: str
    margin: float = 0.0
    """By how much `high` may be lower."""


ORDERINGS = (
    Ordering(claim="RFT without flywheel above prompted", low="prompted", high="rft_rollouts", quantity="accuracy"),
    Ordering(claim="RFT above RFT without flywheel", low="rft_rollouts", high="rft", quantity="accuracy"),
    Ordering(claim="RL above RFT", low="rft", high="rl", quantity="accuracy"),
    Ordering(
        claim="behavior reward above correctness only", low="rl_correctness", high="rl", quantity="efficiency"
    ),
    Ordering(
        claim=f"behavior reward loses less than {NO_LOSS:g}", low="rl_correctness", high="rl", quantity="accuracy",
        margin=NO_LOSS,
    ),
    Ordering(claim="Pareto above random questions", low="rl_random", high="rl", quantity="accuracy"),
    Ordering(claim="Pareto above random questions", low="rl_random", high="rl", quantity="efficiency"),
    Ordering(
        claim="Pareto above random questions, rollouts of pass rates counted", low="rl_random_longer", high="rl",
        quantity="accuracy",
    ),
    Ordering(claim="shrinking above constant sigma 0.2", low="rl_sigma_0.2", high="rl", quantity="accuracy"),
    Ordering(claim="shrinking above constant sigma 3", low="rl_sigma_3", high="rl", quantity="accuracy"),
    Ordering(claim="RL after RFT above RL from prompted", low="rl_from_prompted", high="rl", quantity="accuracy"),
    Ordering(
        claim="flywheel raises the spread of the data", low="data_rollouts", high="data_flywheel", quantity="spread"
    ),
    Ordering(claim="RFT raises the spread of rollouts", low="prompted", high="rft", quantity="spread"),
    Ordering(claim="RL lowers the spread of rollouts", low="rl", high="rft", quantity="spread"),
)  # fmt: skip


def judge_orderings(questions: Questions) -> list[dict[str, Any]]:
    """Difference, interval and verdict of each ordering whose models were measured in at least one seed."""
    found = []
    for ordering in ORDERINGS:
        by_seed = {
            seed: pair_values(models[ordering.low][ordering.quantity], models[ordering.high][ordering.quantity])
            for seed, models in questions.items()
            if ordering.low in models and ordering.high in models
        }
        pooled = [each for differences in by_seed.values() for each in differences]
        if not pooled:
            continue
        low, high = compute_bootstrap_interval(pooled, seed=0)
        means = {seed: fmean(differences) for seed, differences in by_seed.items() if differences}
        found.append(
            {
                "claim": ordering.claim,
                "quantity": ordering.quantity,
                "low": ordering.low,
                "high": ordering.high,
                "difference": fmean(pooled),
                "interval": [low, high],
                "margin": ordering.margin,
                "verdict": decide(low, high, margin=ordering.margin),
                "by_seed": means,
                "seeds": len(means),
                "seeds_with_claim": sum(mean > -ordering.margin for mean in means.values()),
                "questions": len(pooled),
            }
        )
    return found


def pair_values(low: Sequence[float | None], high: Sequence[float | None]) -> list[float]:
    """Differences of the questions where both are defined."""
    return [b - a for a, b in zip(low, high, strict=True) if a is not None and b is not None]


def decide(low: float, high: float, *, margin: float) -> Verdict:
    """Whether an interval of a difference is above `-margin`, below it, or has it inside."""
    if low > -margin:
        return "holds"
    return "does not hold" if high < -margin else "undecided"


def summarize_models(questions: Questions) -> dict[str, dict[str, list[float]]]:
    """Model -> quantity -> mean and interval over the questions of all seeds."""
    labels = dict.fromkeys(label for models in questions.values() for label in models)
    summary: dict[str, dict[str, list[float]]] = {}
    for label in labels:
        of_label = [models[label] for models in questions.values() if label in models]
        summary[label] = {}
        for quantity in QUANTITIES:
            values = [each for found in of_label for each in found.get(quantity, ()) if each is not None]
            if values:
                summary[label][quantity] = [fmean(values), *compute_bootstrap_interval(values, seed=0)]
    return summary


def build_radar(summary: Mapping[str, Mapping[str, list[float]]]) -> Radar:
    """The axes of the radar chart of all models."""
    return {
        "test": {
            label: {axis: found[axis] for axis in AXES if axis in found}
            for label, found in summary.items()
            if "accuracy" in found
        }
    }


def format_models(summary: Mapping[str, Mapping[str, list[float]]]) -> str:
    """A Markdown table with a row for each model."""
    lines = ["| model | " + " | ".join(name.replace("_", " ") for name in QUANTITIES) + " |"]
    lines.append("|---" * (1 + len(QUANTITIES)) + "|")
    for label, found in summary.items():
        cells = [format_estimate(found[name]) if name in found else "-" for name in QUANTITIES]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_estimate(numbers: Sequence[float]) -> str:
    mean, low, high = numbers
    return f"{mean:.3g} ({low:.3g} to {high:.3g})"


def format_orderings(orderings: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with a row for each ordering."""
    lines = ["| ordering | in | difference (95 % interval) | seeds | verdict |", "|---|---|---|---|---|"]
    for each in orderings:
        low, high = each["interval"]
        lines.append(
            f"| {each['claim']} | {each['quantity']} | {each['difference']:+.3f} ({low:+.3f} to {high:+.3f}) "
            f"| {each['seeds_with_claim']} of {each['seeds']} | {each['verdict']} |"
        )
    return "\n".join(lines)
