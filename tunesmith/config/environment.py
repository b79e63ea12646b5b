"""Settings of the environment of a tool agent (`tunesmith.environments`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tunesmith.config.section import Needs, Section

BUILT_IN_TOOLS = ("python", "calculator", "search")
"""Tools that are named without a module."""


class ToolSection(Section):
    """One tool of an environment."""

    tool: str
    """A built-in tool (python, calculator, search), or `module:name` or `file.py:name` of a tool or an async
    function."""
    name: str | None = None
    """Name under which the model calls it; by default the tool's own."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of a built-in tool, as in its section; keyword arguments of a function that builds a tool."""
    max_calls: int | None = Field(default=None, ge=0)
    """Calls of this tool per rollout; null sets no limit besides `max_calls` of the environment."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which a call is cancelled; by default the tool's own. The model reads that its call took too long;
    for search, which may wait for a server, the rollout becomes a failure instead."""
    max_result_chars: int | None = Field(default=None, ge=200)
    """Characters of a result; by default the environment's. python and search have defaults of their own: 4000, and
    room for all passages."""
    is_session: Annotated[bool, Needs("tool", "python")] = False
    """For python: keep variables from call to call, as in a notebook."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, values: Any) -> Any:
        return {"tool": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _check_tool(self) -> Self:
        if ":" not in self.tool and self.tool not in BUILT_IN_TOOLS:
            raise ValueError(f"{self.tool!r} is neither a built-in tool ({', '.join(BUILT_IN_TOOLS)}) nor module:name")
        return self


class EnvironmentSection(Section):
    """How an agent thinks, calls tools and answers."""

    protocol: Literal["tags", "native"] = "tags"
    """tags: `<think>`, tool and `<answer>` tags inside one assistant turn; native: the tool calls of the chat
    template."""
    tools: tuple[ToolSection, ...] = ()
    """The tools, each by name or with settings."""
    prompt: Literal["standard", "brief", "none"] = "standard"
    """System prompt: standard explains the format with an example; brief only names the tags; none for a model that was
    fine-tuned on the format."""
    system_prompt: str | None = None
    """Text in place of the system prompt; `{tools}` in it becomes the list of tools."""
    opening: Annotated[str, Needs("protocol", "tags")] = ""
    """Text that every assistant turn begins with, such as `<think>`; it is never trained."""
    max_calls: int = Field(default=6, ge=0)
    """Tool calls per rollout, of all tools together. A further call is answered with a notice, the next one ends the
    rollout."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens per rollout, over all model calls; null leaves only the limit of a single model call."""
    max_result_chars: int = Field(default=4000, ge=200)
    """Characters of a result that the model reads; the middle of a longer one is left out. The tools python and search
    have limits of their own, see `tools.max_result_chars`."""

    @field_validator("tools")
    @classmethod
    def _check_names(cls, tools: tuple[ToolSection, ...]) -> tuple[ToolSection, ...]:
        names = [each.name or each.tool for each in tools]
        if len(set(names)) < len(names):
            raise ValueError(f"two tools have the same name: {', '.join(sorted(names))}; give one of them a name")
        return tools
