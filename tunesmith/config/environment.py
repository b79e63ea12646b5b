"""Settings of environments (`tunesmith.environments`): of a tool agent, or the name of one with tasks of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from tunesmith.config.section import Needs, Section

BUILT_IN_TOOLS = ("python", "calculator", "search")
"""Tools that are named without a module."""


class ToolSection(Section):
    """One tool of an environment."""

    later_knobs: ClassVar[tuple[str, ...]] = ("tool", "mcp")
    tool: str | None = None
    """A built-in tool (python, calculator, search), or `module:name` or `file.py:name` of a tool or an async
    function."""
    mcp: str | tuple[str, ...] | None = None
    """MCP server whose tools the agent has, in place of `tool`: its URL (streamable HTTP), or the command that starts
    it (stdio). The other knobs hold for each of its tools."""
    name: str | None = None
    """Name under which the model calls it; by default the tool's own. Of an MCP server, the tools are
    `<name>__<tool>`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of a built-in tool or an MCP server, as in its section; keyword arguments of a function that builds a
    tool."""
    max_calls: int | None = Field(default=None, ge=0)
    """Calls of this tool per rollout; null sets no limit besides `max_calls` of the environment."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which a call is cancelled; by default the tool's own. The model reads that its call took too long;
    for search, which may wait for a server, and an MCP server that answers no ping either, the rollout becomes a
    failure instead."""
    max_result_chars: int | None = Field(default=None, ge=200)
    """Characters of a result; by default the environment's. python and search have defaults of their own: 4000, and
    room for all passages."""
    is_session: Annotated[bool, Needs("tool", "python") | Needs("mcp")] = False
    """For python: keep variables from call to call, as in a notebook. For an MCP server that keeps state: each rollout
    has a connection of its own, over stdio a process."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, values: Any) -> Any:
        return {"tool": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _check_tool(self) -> Self:
        if (self.tool is None) == (self.mcp is None):
            raise ValueError("a tool has either `tool` or `mcp`")
        if self.tool is not None and ":" not in self.tool and self.tool not in BUILT_IN_TOOLS:
            raise ValueError(f"{self.tool!r} is neither a built-in tool ({', '.join(BUILT_IN_TOOLS)}) nor module:name")
        return self

    @property
    def source(self) -> str:
        """The tool or the MCP server, as the file names it."""
        return self.tool or (self.mcp if isinstance(self.mcp, str) else " ".join(self.mcp or ()))


ENVIRONMENT_TASKS = "environment"
"""The `path` of a data set that stands for the tasks of the named environment."""
PLAY = "tunesmith.environments:play"
NAMED, UNNAMED = Needs("name"), Needs("name", None)
"""Conditions of the knobs of environments with tasks, and of those of tool agents alone."""


class EnvironmentSection(Section):
    """How an agent thinks, calls tools and answers; or, with `name`, an environment that has tasks and rewards."""

    name: str | None = None
    """Environment with tasks, as `family:member` (`tunesmith environments list`), or `module:Class` or `file.py:Class`
    of your own; a text in place of the section is its name. Null is a tool agent."""
    args: Annotated[dict[str, Any], NAMED] = Field(default_factory=dict)
    """Arguments of the generator, the game or the class."""
    python: Annotated[str | None, NAMED] = None
    """Interpreter of an environment that has one of its own (verifiers), such as `/opt/verifiers/bin/python`; null is
    that of this program."""
    num_train: Annotated[int, NAMED] = Field(default=1000, ge=1)
    """Tasks of the split train."""
    num_test: Annotated[int, NAMED] = Field(default=100, ge=0)
    """Tasks of the split test; no task is in both splits. With 0, set `eval_datasets: {}`."""
    seed: Annotated[int, NAMED] = Field(default=0, ge=0, le=10**9)
    """First seed of the tasks; another one gives other tasks."""
    max_turns: Annotated[int, NAMED] = Field(default=30, ge=1)
    """Replies after which an episode ends with the rewards so far."""
    step_timeout_s: Annotated[float, NAMED] = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds of one `reset`, `step` or `close`, after which the rollout has failed; `rollout.timeout_s` limits the
    episode."""
    protocol: Annotated[Literal["tags", "native"], UNNAMED] = "tags"
    """tags: `<think>`, tool and `<answer>` tags inside one assistant turn; native: the tool calls of the chat
    template."""
    tools: Annotated[tuple[ToolSection, ...], UNNAMED] = ()
    """The tools, each by name or with settings."""
    prompt: Annotated[Literal["standard", "brief", "none"], UNNAMED] = "standard"
    """System prompt: standard explains the format with an example; brief only names the tags; none for a model that was
    fine-tuned on the format."""
    system_prompt: str | None = None
    """Text in place of the system prompt; for a tool agent, `{tools}` in it becomes the list of tools."""
    opening: Annotated[str, UNNAMED, Needs("protocol", "tags")] = ""
    """Text that every assistant turn begins with, such as `<think>`; it is never trained."""
    max_calls: Annotated[int, UNNAMED] = Field(default=6, ge=0)
    """Tool calls per rollout, of all tools together. A further call is answered with a notice, the next one ends the
    rollout."""
    max_tokens: Annotated[int | None, UNNAMED] = Field(default=None, ge=1)
    """Sampled tokens per rollout, over all model calls; null leaves only the limit of a single model call."""
    max_result_chars: Annotated[int, UNNAMED] = Field(default=4000, ge=200)
    """Characters of a result that the model reads; the middle of a longer one is left out. The tools python and search
    have limits of their own, see `tools.max_result_chars`."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Without the knobs of the other kind: digests of files that earlier versions wrote stay the same."""
        fields, other = type(self).model_fields, NAMED if self.name is None else UNNAMED
        unset = [key for key in ("name", "python") if not getattr(self, key)]
        values: dict[str, Any] = write(self)
        return {key: each for key, each in values.items() if other not in fields[key].metadata and key not in unset}

    @field_validator("tools")
    @classmethod
    def _check_names(cls, tools: tuple[ToolSection, ...]) -> tuple[ToolSection, ...]:
        names = [each.name or each.source for each in tools]
        if len(set(names)) < len(names):
            raise ValueError(f"two tools have the same name: {', '.join(sorted(names))}; give one of them a name")
        return tools


def add_environment_tasks(cls: type[Section], values: Any) -> Any:
    """The values of a file with the tasks and the workflow of the environment that it names, where it names none.

    Agents of `serve` run elsewhere, so that its files name their tasks themselves.
    """
    if not isinstance(values, Mapping) or values.get("serve") is not None:
        return values
    section = values.get("environment")
    name = section.get("name") if isinstance(section, Mapping) else getattr(section, "name", section)
    if not isinstance(name, str):
        return values
    added: dict[str, Any] = {}
    if values.get("workflow") is None:
        added["workflow"] = PLAY
    if values.get("train_dataset") is None and not values.get("train_datasets"):
        added["train_dataset"] = {"path": ENVIRONMENT_TASKS}
    if values.get("eval_datasets") is None:
        added["eval_datasets"] = {"test": {"path": ENVIRONMENT_TASKS, "split": "test"}}
    return {**values, **{key: value for key, value in added.items() if key in cls.model_fields}}
