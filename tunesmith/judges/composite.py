"""Composite rewards: a weighted sum of parts, each logged as a metric, and the judges that run files name.

`compose` builds a judge from parts. The gate is the part that scores correctness: for a wrong answer the weights of the
other parts are reduced, so that every wrong answer gets less than any right answer. `compose` checks this inequality
when it builds the judge. If a weighted part returns None (no score), the reward is None: a failure is not a reward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.judges.answers import build_tolerant_match, match_exact, match_numeric, match_symbolic, score_f1
from tunesmith.judges.squad import score_exact_match, score_token_f1
from tunesmith.judges.style import score_conciseness, score_format, score_reasoning
from tunesmith.judges.transcript import read_transcript
from tunesmith.types import Judge, JudgeOutput

SHARE_WHEN_WRONG = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One part of a reward."""

    name: str
    """Name of its metric."""
    weight: float = 1.0
    """Weight of its score in the reward; with 0 the score is logged only."""
    score: Callable[..., Any]
    """`score(task, transcript)`, or `async score(task, transcript, auxiliary_models)`; returns a score, or None if
    there is none."""
    lowest: float = 0.0
    """The lowest score it returns; the highest is 1."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight) or self.weight < 0:
            raise ValueError(f"the weight of part {self.name!r} is {self.weight}; it must be 0 or more")


def compose(*parts: RewardPart, gate: str | None = None, share_when_wrong: float = SHARE_WHEN_WRONG) -> Judge:
    """Build a judge whose reward is the weighted sum of the parts, at least 0, with each part's score as a metric.

    `gate` names the part that scores correctness. If its score is s, the weights of the other parts are multiplied by
    `share_when_wrong + (1 - share_when_wrong) * s`. Raises ValueError if a wrong answer (s = 0) could get as much as a
    right one (s = 1).
    """
    _check_names(parts)
    if gate is not None:
        _check_gate(parts, gate, share_when_wrong)

    async def judge(
        task: Mapping[str, Any], response: Any, auxiliary_models: Mapping[str, Any] | None = None
    ) -> JudgeOutput:
        transcript = read_transcript(response)
        scores: dict[str, float | None] = {}
        for part in parts:
            if inspect.iscoroutinefunction(part.score):
                score = await part.score(task, transcript, auxiliary_models or {})
            else:
                score = part.score(task, transcript)
            scores[part.name] = _check_score(part, score)
        metrics = {name: score for name, score in scores.items() if score is not None}
        reward = _compute_reward(parts, metrics, gate=gate, share_when_wrong=share_when_wrong)
        return JudgeOutput(reward=reward, metrics=metrics)

    return judge


def _compute_reward(
    parts: tuple[RewardPart, ...], scores: Mapping[str, float], *, gate: str | None, share_when_wrong: float
) -> float | None:
    """The weighted sum; None if a part of non-zero weight, or the gate, has no score."""
    terms: list[float] = []
    for part in parts:
        if part.weight == 0:
            continue
        if part.name not in scores or (gate is not None and gate not in scores):
            return None
        share = 1.0
        if gate is not None and part.name != gate:
            share = share_when_wrong + (1 - share_when_wrong) * scores[gate]
        terms.append(part.weight * share * scores[part.name])
    return max(math.fsum(terms), 0.0)


def _check_score(part: RewardPart, score: Any) -> float | None:
    if score is None:
        return None
    if not part.lowest <= score <= 1:
        raise ValueError(f"part {part.name!r} scored {score}, outside of [{part.lowest:g}, 1]")
    return float(score)


def _check_names(parts: tuple[RewardPart, ...]) -> None:
    names = [part.name for part in parts]
    if len(set(names)) < len(names) or not any(part.weight for part in parts):
        raise ValueError(f"a judge needs parts of different names, one of them with a weight; got {names}")


def _check_gate(parts: tuple[RewardPart, ...], gate: str, share_when_wrong: float) -> None:
    weights = {part.name: part.weight for part in parts}
    if gate not in weights or not 0 <= share_when_wrong <= 1:
        raise ValueError(
            f"gate={gate!r} must name one of the parts {list(weights)}, and share_when_wrong={share_when_wrong} must "
            "be from 0 to 1"
        )
    others = [part for part in parts if part.name != gate]
    best_wrong = share_when_wrong * sum(part.weight for part in others)
    worst_right = weights[gate] + sum(part.weight * part.lowest for part in others)
    if best_wrong >= worst_right:
        raise ValueError(
            f"a wrong answer could get {best_wrong:g} and a right one as little as {worst_right:g}: lower "
            f"share_when_wrong={share_when_wrong:g}, or give the gate {gate!r} more weight"
        )


gsm8k_judge = compose(
    RewardPart(name="accuracy", weight=0.50, score=build_tolerant_match(0.01)),
    RewardPart(name="format", weight=0.20, score=score_format),
    RewardPart(name="reasoning", weight=0.20, score=score_reasoning),
    RewardPart(name="conciseness", weight=0.10, score=score_conciseness, lowest=-0.5),
    RewardPart(name="exact", weight=0.0, score=match_numeric),
    gate="accuracy",
)
"""Accuracy within 1 %, format, reasoning, conciseness; `exact` measures whether the number is exactly equal."""

numeric_judge = compose(
    RewardPart(name="accuracy", score=match_numeric), RewardPart(name="format", weight=0, score=score_format)
)
"""1 for the right number; the format is measured, not rewarded."""

math_verify_judge = compose(RewardPart(name="accuracy", score=match_symbolic))
"""1 if math-verify finds the answer equal to the reference."""

exact_judge = compose(RewardPart(name="accuracy", score=match_exact))
"""1 if the answer has the words of a reference."""

f1_judge = compose(RewardPart(name="f1", score=score_f1), RewardPart(name="accuracy", weight=0, score=match_exact))
"""F1 of the answer's words with the best reference."""

squad_judge = compose(
    RewardPart(name="f1", score=score_token_f1), RewardPart(name="em", weight=0, score=score_exact_match)
)
"""Token F1 with the best of the accepted answers, normalized as in SQuAD; exact match is measured, not rewarded."""
