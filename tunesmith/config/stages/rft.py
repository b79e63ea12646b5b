"""Knobs of filtering trajectories for rejection fine-tuning."""

from __future__ import annotations

from pydantic import Field, model_validator

from tunesmith.config.environment.environment import EnvironmentSection
from tunesmith.config.section import Section


class RftFilterSection(Section):
    """Filter of trajectories for rejection fine-tuning (RFT): right, well-formed, without failed calls."""

    data: str | tuple[str, ...]
    """JSON lines file, or several, of rows with `question`, `transcript` and `correctness`."""
    environment: EnvironmentSection | None = None
    """Environment whose prompt, and with native calls whose tools, the conversations have; null uses the `system` of
    each row. Set it to the environment that trains later."""
    correct_at: float = Field(default=0.75, gt=0)
    """Correctness from which a trajectory is right."""
    has_format_check: bool = True
    """Remove trajectories with a format error."""
    max_failed_calls: int | None = Field(default=0, ge=0)
    """Maximum number of failed tool calls of a trajectory; null keeps any number."""
    max_per_question: int | None = Field(default=4, ge=1)
    """Maximum number of trajectories of a question; different orders of tools are kept first, then those with fewer
    calls. null keeps all."""
    trains_forced: bool = False
    """Also train text that the model did not write, such as hints."""
    embedding_model: str | None = None
    """Folder or hub id of a sentence-transformers model, which embeds trajectories for the report of diversity; needs
    the extra `embeddings`. null reports the spread of word pairs instead, under another name."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.data,) if isinstance(self.data, str) else self.data

    @model_validator(mode="after")
    def _check_paths(self) -> RftFilterSection:
        if not self.paths:
            raise ValueError("data is an empty list: name at least one file")
        return self
