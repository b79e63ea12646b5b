"""Knobs of how rollouts run: limits, staleness, and branching (ARPO, AEPO)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tunesmith.config.section import Needs, Section


class BranchingSection(Section):
    """Branching rollouts: where the model is unsure after a tool result, a rollout continues in several ways."""

    initial_rollouts: int | None = Field(default=None, ge=1)
    """Rollouts of a group that start from the task; the others branch from them, and what no branch used starts from
    the task at the end. null takes half of `algorithm.group_size`, rounded up. Raise it for tasks whose first turns
    decide."""
    beam: int = Field(default=2, ge=2)
    """Continuations at a branch point at most, the rollout's own included; each further one is drawn separately."""
    entropy_window: int = Field(default=20, ge=1)
    """Sampled tokens after a tool result, and at the start of the rollout, whose entropy is compared."""
    base_probability: float = Field(default=0.5, ge=0, le=1)
    """Probability of a branch where the entropy after a tool result equals that at the start of the rollout."""
    entropy_weight: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """Change of the probability per unit of entropy, the sum over the window divided by the log of the vocabulary
    size. 0 branches everywhere with `base_probability`; raise it if branches should follow the entropy more closely."""
    consecutive_penalty: float = Field(default=0.0, ge=0, le=1)
    """Share of the probability that each consecutive branch before on the same path takes away (AEPO); 0 takes away
    none. Set it if most branches of a group lie on one path."""
    dynamic_budget_slope: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Choose the number of initial rollouts of each group from the entropies of its first rollout (AEPO): group size x
    sigmoid(slope x (entropy at the start - mean entropy after tool results)). The other rollouts of the group wait for
    the first one. null uses `initial_rollouts`; with a slope these count only if the first rollout calls no tool."""
    credit: Literal["soft", "hard"] = "soft"
    """Advantage of tokens that several rollouts share: soft trains them once per rollout, with the advantage of each;
    hard trains them once, with the mean advantage."""


class RolloutSection(Section):
    """Execution of workflows and judges."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum number of steps between the weights that sample a token and those that train on it. Above 0 a step trains
    on the first complete groups, and rollouts that have not ended continue under the new weights; raise it (1 to 4) if
    steps wait for a few slow rollouts. 0 waits for all rollouts of a step."""
    stale_cache: Annotated[Literal["recompute", "keep"], Needs("max_staleness", above=0)] = "recompute"
    """Keys and values of unfinished replies after an update. recompute: those of the new
    weights; keep: the old ones, which saves the prefill, and the rest of the reply has the policy version that they
    had."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds of one rollout, workflow and judge together; a rollout that exceeds it has failed."""
    max_concurrency: int = Field(default=256, ge=1)
    """Maximum number of concurrent workflows; also the number of threads for `asyncio.to_thread`."""
    thread_patience_s: float = Field(default=0.03, ge=0)
    """Mean duration in seconds up to which the engine waits for a function's calls in threads, so that sampling on a
    CPU does not depend on their timing; slower functions are not waited for. 0 never waits. Raise it if runs with
    slower tools must be reproducible."""
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of 127.0.0.1 on which the models are also served over HTTP while workflows run, 0 for any free port. Set it
    for agents in other processes or languages; they use `model.base_url` and `model.api_key`."""
    max_body_mib: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    """Maximum size of an HTTP request in MiB; larger ones get status 413."""
    chat_model: Literal["auto", "agentscope", "openai"] = "auto"
    """Type of a workflow's `model` argument: AgentScope's OpenAIChatModel, or a callable that returns OpenAI
    completions; auto uses AgentScope's if it is installed."""
    has_agent_output: bool = False
    """Let AgentScope's agents print every message to the console; by default their printing is disabled during the
    run."""
    max_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """Maximum share of failed trajectories in a step; above it the run stops and reports the first causes."""
    assignment: Literal["plan", "balanced"] = "plan"
    """Which of several ranks runs a task: one by its position, so that CPU runs are reproducible, or the next one with
    room; `balanced` helps if `max_concurrency` is below the rollouts of a rank's share, which leaves tasks to take."""
    branching: BranchingSection | None = None
    """Let rollouts of training steps branch after tool results (ARPO, AEPO); null runs each from the task."""
