"""Settings of the tuning of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tunesmith.commands.candidates.runs import RunLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTuning:
    """What to optimize and how hard."""

    initial_prompt: str
    level: Literal["light", "medium", "heavy"] | None
    """MIPROv2's `auto`; None: the two numbers below."""
    num_candidates: int | None
    num_trials: int | None
    limits: RunLimits
    is_compared: bool
    """Also evaluate the initial prompt on the held-out tasks."""
    num_shown_tasks: int
    """Held-out tasks that are printed with their rewards."""
    has_progress: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteLlmModel:
    """The model that proposes prompts, called through LiteLLM."""

    name: str
    base_url: str | None = None
    api_key: str | None = None
