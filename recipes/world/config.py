"""Knobs of the fictional world: how many documents and questions, of which kinds, with how many distractors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from tunesmith.config.section import Section
from tunesmith.errors import ConfigError

QuestionKind = Literal["multi_hop", "comparison", "compute"]
Split = Literal["train", "test"]
DEFAULT_SHARES: Mapping[QuestionKind, float] = {"multi_hop": 0.5, "comparison": 0.25, "compute": 0.25}


class WorldConfig(Section):
    """A knowledge base and the questions about it."""

    num_documents: int = Field(default=1000, ge=1, le=100_000_000)
    """Passages of the knowledge base; more of them make retrieval harder."""
    num_train: int = Field(default=500, ge=0)
    """Training questions. 1,000 documents suffice for thousands of different ones; more questions about the same
    entities need more documents."""
    num_test: int = Field(default=100, ge=0)
    """Test questions, about other entities than the training questions."""
    seed: int = 0
    """Names, facts, wording and questions are a function of the seed and the other knobs."""
    kind_shares: dict[QuestionKind, float] = Field(default_factory=lambda: dict(DEFAULT_SHARES))
    """Relative number of questions of each kind; a kind that is left out is not asked."""
    min_hops: int = Field(default=1, ge=1, le=3)
    """Fewest facts that must be chained; raise it to leave out questions that one search answers."""
    max_hops: int = Field(default=3, ge=1, le=3)
    """Most facts that are chained; comparisons and computations chain up to this number for each operand."""
    distractors_per_entity: int = Field(default=1, ge=0, le=5)
    """Entities with a nearly identical name and other values for each entity that questions are about; raise it where
    search by name alone is too easy."""
    num_wordings: int = Field(default=3, ge=1, le=3)
    """Different sentences of documents for the same relation; with 1 a model that has seen little text learns to read
    them sooner."""
    irrelevant_share: float = Field(default=0.1, ge=0, le=0.9)
    """Share of documents that no question is about and that name no entity of the facts."""

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        if self.min_hops > self.max_hops:
            raise ValueError(f"min_hops={self.min_hops} is above max_hops={self.max_hops}")
        if any(not 0 <= share < float("inf") for share in self.kind_shares.values()) or not self.total_share:
            raise ValueError(f"kind_shares={self.kind_shares} must be finite, not negative and not all 0")
        return self

    @property
    def total_share(self) -> float:
        return sum(self.kind_shares.values())

    def count_questions(self, kind: QuestionKind, *, split: Split) -> int:
        """Questions of a kind in a split; the counts of all kinds add up to the size of the split."""
        total = self.num_train if split == "train" else self.num_test
        before = 0.0
        for each, share in self.kind_shares.items():
            after = before + share
            if each == kind:
                return round(total * after / self.total_share) - round(total * before / self.total_share)
            before = after
        return 0


def build_config(knobs: Mapping[str, Any]) -> WorldConfig:
    """Check the knobs; an error is one sentence that names the knob."""
    try:
        return WorldConfig(**knobs)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name}={first['input']!r}: {first['msg']}" if name else first["msg"]) from error
