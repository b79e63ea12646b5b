"""Load workflows, judges, tools and other user functions from `module:function` or `file.py:function`."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tunesmith.config import DatasetSection, EnvironmentSection, PythonToolSection, RunConfig, ToolSection
from tunesmith.config.environment import ENVIRONMENT_TASKS
from tunesmith.errors import ConfigError, errors_of
from tunesmith.rollout.signature import (
    AUXILIARY_MODELS,
    ENVIRONMENT,
    check_judge_function,
    check_workflow_function,
    find_innermost,
    list_parameters,
)
from tunesmith.runs.load_config import build_section
from tunesmith.tools.tool import Tool
from tunesmith.types import JudgeType, WorkflowType

if TYPE_CHECKING:
    from tunesmith.environments.environment import Environment
    from tunesmith.environments.episode import TaskEnvironment

LOADED: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
"""Imported files with their modification time (ns) and size (bytes) at import."""

TOOL_AGENT = "tunesmith.environments.tool_agent:tool_agent"
TOOL_AGENTS = (TOOL_AGENT, "tunesmith.environments:tool_agent")
"""How files name it."""
PLAY_FUNCTION = "tunesmith.environments.episode:play"


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomComponents:
    """Selectors, operators and functions that the caller of `tune()` passed as objects."""

    selectors: Mapping[str, Any] = field(default_factory=dict)
    """Training set name -> a selector, or a class or function that builds one from the tasks."""
    operators: Sequence[Callable[..., Any]] = ()
    """Operators on groups, applied after those of the config."""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Knob, such as `algorithm.loss` -> the function, whose name is in the config."""

    def load(self, spec: str | None, *, knob: str) -> Callable[..., Any] | None:
        """The function that was passed for the knob, or else the one that its value names."""
        if knob in self.functions or spec is None:
            return self.functions.get(knob)
        return load_function(spec, knob=knob)


def load_function(spec: str, *, knob: str) -> Callable[..., Any]:
    """Import the function named by `module:function` or `path/to/file.py:function`."""
    source, name = split_spec(spec, knob=knob)
    module = load_module(source, knob=knob)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [each for each in vars(module) if callable(vars(module)[each])], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{knob}={spec!r}: {source} has no function {name!r}{hint}")
    return function


def load_functions(
    config: RunConfig, workflow: WorkflowType | None = None, judge: JudgeType | None = None
) -> tuple[WorkflowType, JudgeType | None]:
    """The given workflow and judge; those that are None are imported as the config names them. A workflow with a
    parameter `environment` is bound to the environment of the config. Signatures are checked."""
    if workflow is None and config.workflow is None:
        raise ConfigError(
            "workflow is missing: name the agent as file.py:function (--workflow, or workflow: in the file), or pass "
            "workflow_func"
        )
    if judge is None and config.judge is not None:
        judge = load_function(config.judge, knob="judge")
    if workflow is None:
        assert config.workflow is not None
        workflow = load_function(config.workflow, knob="workflow")
    named = None if config.environment.name is None else load_task_environment(config)
    if named is not None and named.run is not None and config.rollout.http_port is None:
        raise ConfigError(
            f"environment={named.name!r} calls the model over HTTP, which is off: set rollout.http_port, 0 for a free "
            "port"
        )
    if ENVIRONMENT in list_parameters(workflow):
        function: Callable[..., Any] = workflow
        if named is not None and name_function(function) == TOOL_AGENT:
            raise ConfigError(
                f"environment={named.name!r} is no tool agent: leave out workflow, or give environment its tools"
            )
        workflow = functools.partial(function, environment=named or load_environment(config.environment))
        if named is not None and named.num_players > 1 and name_function(function) == PLAY_FUNCTION:
            from tunesmith.environments.episode import play_seat  # deferred as in load_environment

            workflow = functools.partial(play_seat, environment=named)

    elif (
        not any(
            has_environment_tasks(config, each)
            for each in (*config.training_sets.values(), *config.eval_datasets.values())
        )
        and not (isinstance(workflow, functools.partial) and ENVIRONMENT in workflow.keywords)
        and (knob := next(filter(config.environment.is_changed, EnvironmentSection.model_fields), None)) is not None
    ):
        raise ConfigError(
            f"environment.{knob} has no effect: the workflow {name_function(workflow)} has no parameter `environment`; "
            "add it, or remove the section environment"
        )
    takes = list_parameters(workflow) | (frozenset() if judge is None else list_parameters(judge))
    if config.auxiliary_models and AUXILIARY_MODELS not in takes:
        raise ConfigError(
            f"auxiliary_models.{next(iter(config.auxiliary_models))} has no effect: neither the workflow nor the judge "
            "has a parameter `auxiliary_models`; add it, or remove the section"
        )
    check_workflow_function(workflow, allows_sync=True)
    if judge is not None:
        check_judge_function(judge)
    return workflow, judge


def load_environment(section: EnvironmentSection) -> Environment:
    """The environment of a tool agent, with its tools."""
    if section.name is not None:
        raise ConfigError(f"environment={section.name!r} is no tool agent, which is needed here: give it tools instead")
    # openai and math-verify are slow to import, and commands check their files with this module first
    from tunesmith.environments.environment import Environment

    return Environment(section, tools=[tool for each in section.tools for tool in load_tools(each)])


def load_task_environment(config: RunConfig) -> TaskEnvironment:
    # deferred as in load_environment; the packages of `sets` are optional
    from tunesmith.environments.episode import TaskEnvironment
    from tunesmith.environments.sets import FAMILIES, load_set

    section = config.environment
    assert section.name is not None
    family, args = section.name.partition(":")[0], dict(section.args)
    has_interpreter = family in FAMILIES and FAMILIES[family].has_interpreter
    for knob in ("max_turns", "step_timeout_s", "system_prompt") if has_interpreter else ("python",):
        if section.is_changed(knob):
            where = "it has its own loop (args)" if has_interpreter else "it runs in this process"
            raise ConfigError(f"environment.{section.show(knob)} has no effect with name={section.name}: {where}")
    if family in FAMILIES:
        if has_interpreter:
            args["python"] = section.python
        if isinstance(wrapper := args.get("wrapper"), str):
            args["wrapper"] = load_function(wrapper, knob="environment.args.wrapper")
        environment = load_set(section.name, args)
    else:
        close = difflib.get_close_matches(family, FAMILIES, n=1)
        if close or ":" not in section.name:
            advice = f"did you mean {close[0]}?" if close else f"families are {', '.join(FAMILIES)}"
            raise ConfigError(
                f"environment={section.name!r} is no name of an environment: {advice} (own ones are file.py:Class)"
            )
        own = load_function(section.name, knob="environment")
        if missing := [each for each in ("reset", "step", "close") if not callable(getattr(own, each, None))]:
            raise ConfigError(f"environment={section.name!r} has no method {missing[0]}: write reset, step and close")
        try:
            inspect.signature(own).bind(**args)
        except TypeError as error:
            raise ConfigError(f"environment.args of {section.name}: {error}") from error
        environment = TaskEnvironment(
            name=section.name, create=functools.partial(own, **args), num_players=getattr(own, "num_players", 1)
        )
    return replace(
        environment,
        system_prompt=environment.system_prompt if section.system_prompt is None else section.system_prompt,
        max_turns=section.max_turns,
        step_timeout_s=section.step_timeout_s,
        step_reward_key=config.algorithm.advantage_args.get("step_reward_key"),
    )


def has_environment_tasks(config: RunConfig, dataset: DatasetSection) -> bool:
    """Whether a data set stands for the tasks of the run's environment."""
    return config.environment.name is not None and dataset.path == ENVIRONMENT_TASKS


def load_tools(section: ToolSection) -> list[Tool]:
    """The tool that the section names, or all those of its MCP server."""
    if section.mcp is None:
        return [load_tool(section)]
    # httpx, which a check of a run file does not wait for
    from tunesmith.tools.mcp import McpToolSection, load_mcp_tools

    limit = {} if section.timeout_s is None else {"timeout_s": section.timeout_s}
    with errors_of("environment.tools: mcp"):
        settings = build_section(McpToolSection, section.settings)
        tools = load_mcp_tools(section.mcp, settings, prefix=section.name, is_session=section.is_session, **limit)
    return [change_limits(each, section, ("max_calls", "max_result_chars")) for each in tools]


def change_limits(tool: Tool, section: ToolSection, names: Sequence[str]) -> Tool:
    """The tool with those of the knobs that the section sets."""
    return replace(tool, **{name: value for name in names if (value := getattr(section, name)) is not None})


def load_tool(section: ToolSection) -> Tool:
    """A built-in tool, or the tool, async function, or builder of a tool that the section names."""
    # deferred as in load_environment
    from tunesmith.tools.calculator import build_calculator_tool
    from tunesmith.tools.python.tool import PythonTool

    name = section.tool
    assert name is not None
    knob = f"environment.tools: {name}"
    if name == "python":
        limit = {} if section.max_result_chars is None else {"max_result_chars": section.max_result_chars}
        with errors_of(f"{knob}: settings"):
            settings = build_section(PythonToolSection, limit | section.settings)
        tool = PythonTool(settings).build_tool(is_session=section.is_session)
    elif name == "calculator":
        tool = build_calculator_tool()
    elif name == "search":
        # numpy and httpx, which a check of a run file does not wait for
        from tunesmith.tools.search.settings import SearchToolSection
        from tunesmith.tools.search.tool import SearchTool

        with errors_of(f"{knob}: settings"):
            search = build_section(SearchToolSection, section.settings)
            tool = SearchTool(search, total_timeout_s=section.timeout_s).build_tool()
        section = section.model_copy(update={"timeout_s": None})  # what exceeds a limit of a Tool is an observation
    else:
        source, name = split_spec(name, knob=knob)
        found = getattr(load_module(source, knob=knob), name, None)
        tool = convert_tool(found, section.settings, knob=knob)
    return change_limits(tool, section, ("name", "max_calls", "timeout_s", "max_result_chars"))


def convert_tool(found: Any, settings: Mapping[str, Any], *, knob: str) -> Tool:
    """A tool from what a module has under a name; the settings are arguments of a function that builds one."""
    if not callable(found) and not isinstance(found, Tool):
        raise ConfigError(f"{knob} is neither a tool nor a function")
    is_builder = not isinstance(found, Tool) and not inspect.iscoroutinefunction(found)
    if settings and not is_builder:
        raise ConfigError(f"{knob} has settings, which only a function that builds a tool takes")
    try:
        built = found(**settings) if is_builder else found
        return built if isinstance(built, Tool) else Tool.from_function(built)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{knob}: {error}") from error


def load_component(spec: str, *, knob: str) -> Callable[..., Any]:
    """Like `load_function`; also accepts `module.name`."""
    if ":" not in spec:
        source, _, name = spec.rpartition(".")
        spec = f"{source}:{name}"
    return load_function(spec, knob=knob)


def name_function(function: Callable[..., Any]) -> str:
    """`module:name` of a function or object, under which a run's config records it."""
    function = find_innermost(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def check_function(spec: str, *, knob: str) -> None:
    """Raise if the spec is malformed, or its file is missing or has a syntax error; no user code runs."""
    source = split_spec(spec, knob=knob)[0]
    if source.endswith(".py"):
        path = find_file(source, knob=knob)
        try:
            ast.parse(path.read_bytes(), filename=str(path))
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{knob}={spec!r} cannot be imported: {describe_error(error, path)}") from error


def split_spec(spec: str, *, knob: str) -> tuple[str, str]:
    """Split a spec into module or file, and function name."""
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"{knob}={spec!r} must have the form module:function or file.py:function")
    return source, name


def find_file(source: str, *, knob: str) -> Path:
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{knob}: no file {source!r}; give the path of the Python file that defines the function")
    return path.resolve()


def load_module(source: str, *, knob: str) -> ModuleType:
    """Import a file or module; an error in its code becomes one sentence with file and line."""
    path = find_file(source, knob=knob) if source.endswith(".py") else None
    try:
        return importlib.import_module(source) if path is None else import_file(path)
    except (Exception, SystemExit) as error:  # user code
        missing = error.name if path is None and isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{source}.".startswith(f"{missing}."):
            is_recipe = source.startswith("recipes.")
            clone = f"run in the root of a clone of Tunesmith's repository, where {source} is"
            advice = clone if is_recipe else "install it or give file.py:function"
            raise ConfigError(f"{knob}: no module {missing!r}; {advice}") from error
        raise ConfigError(f"{knob}: {source} cannot be imported: {describe_error(error, path)}") from error


def import_file(path: Path) -> ModuleType:
    """Import a file once, until it changes on disk; its folder is put on `sys.path`."""
    stamp = (path.stat().st_mtime_ns, path.stat().st_size)
    if path not in LOADED and is_module_of(sys.modules.get(path.stem), path):
        LOADED[path] = (stamp, sys.modules[path.stem])  # another file imported it by name
    known = LOADED.get(path)
    if known is not None and known[0] == stamp:
        return known[1]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = choose_module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    LOADED[path] = (stamp, module)
    return module


def choose_module_name(path: Path) -> str:
    """The file's stem if no other module has that name, so that neighboring files import the same module."""
    found = sys.modules.get(path.stem)
    if path.stem.isidentifier() and (found is None or is_module_of(found, path)):
        return path.stem
    return f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def is_module_of(module: ModuleType | None, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


def describe_error(error: BaseException, path: Path | None) -> str:
    """File, line, type and message of an error raised while a module was imported."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and frame.filename == str(path)] or [
        frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__
    ]
    where = f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
    return f"{where}{type(error).__name__}: {message}" if message else f"{where}{type(error).__name__}"
