"""AgentScope's configuration of `tune_prompt`, with its fields and defaults, and fields of Tunesmith after them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tunesmith.errors import ConfigError


class PromptTuneConfig(BaseModel):
    """The optimizer of a system prompt: the model that proposes prompts, the effort, and the evaluation."""

    model_config = ConfigDict(extra="forbid")

    lm_model_name: str = "dashscope/qwen-plus"
    """Model that proposes prompts, by LiteLLM's name; ignored if `tune_prompt` has a `prompt_model`."""
    optimization_level: Literal["light", "medium", "heavy"] | None = "light"
    """Number of prompts, trials and tasks, as MIPROv2's `auto`; None: `num_candidates` and `num_trials`."""
    eval_display_progress: bool = True
    """Print a line for each evaluated prompt."""
    eval_display_table: int = Field(default=5, ge=0)
    """Number of held-out tasks that are printed with their rewards under both prompts."""
    eval_num_threads: int = Field(default=16, ge=1)
    """Number of workflows that run at once."""
    compare_performance: bool = True
    """Also evaluate the initial prompt on the held-out set."""
    lm_base_url: str | None = None
    """URL of an OpenAI-compatible server that has `lm_model_name`, whose name is then that on the server."""
    lm_api_key_env: str | None = None
    """Environment variable with the server's API key."""
    num_candidates: int | None = Field(default=None, ge=3)
    """Number of proposed prompts, if `optimization_level` is None."""
    num_trials: int | None = Field(default=None, ge=1)
    """Number of evaluated choices among the proposed prompts, if `optimization_level` is None."""
    seed: int = Field(default=9, ge=1)
    """Seed of the optimizer, of local models and of the bootstrap; 9 is MIPROv2's default."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of a workflow and its judge."""
    max_failure_rate: float = Field(default=0.2, ge=0, lt=1)
    """A prompt with more failed workflows than this is not chosen; for the initial prompt they are an error."""

    @model_validator(mode="after")
    def _check_effort(self) -> Self:
        given = [self.num_candidates, self.num_trials]
        if self.optimization_level is None and None in given:
            raise ConfigError("optimization_level=None needs num_candidates and num_trials")
        if self.optimization_level is not None and given != [None, None]:
            raise ConfigError(
                f"num_candidates and num_trials have no effect with optimization_level={self.optimization_level!r}: "
                "set it to None"
            )
        return self

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.lm_base_url is None and self.lm_api_key_env is not None:
            raise ConfigError("lm_api_key_env has no effect without lm_base_url: LiteLLM reads the provider's variable")
        return self
