"""System prompts: how to think, call tools and answer, with the tools that the environment has."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tunesmith.config.environment import EnvironmentSection
from tunesmith.tools.tool import Tool

TAGS_WITH_TOOLS = """Solve the problem step by step. You may use these tools:
{tools}

Write every step in tags. Think inside <think> and </think>. To use a tool, write its tag with the input inside, and
stop: the result appears between <result> and </result>, and you think again about what it says. Never write <result>
yourself. Call a tool only if you need it, and never for what you already know.

When you know the answer, write it between <answer> and </answer>, with the final answer itself in \\boxed{{}}.

An example of the format:
{example}"""
TAGS_WITHOUT_TOOLS = """Solve the problem step by step. Think inside <think> and </think>, then write the answer between
<answer> and </answer>, with the final answer itself in \\boxed{{}}.

An example of the format:
{example}"""
TAGS_BRIEF = "Think in <think></think>.{calls} Answer in <answer></answer>, the final answer in \\boxed{{}}."
NATIVE_WITH_TOOLS = """Solve the problem step by step. Call a tool only if you need it, and never for what you already
know. When you know the answer, write it without a further call, with the final answer itself in \\boxed{{}}."""
NATIVE_WITHOUT_TOOLS = "Solve the problem step by step. Write the final answer itself in \\boxed{{}}."

EXAMPLE_INPUTS = {
    "python": "print(1979 - 1912)",
    "calculator": "1979 - 1912",
    "search": "year of birth of the architect",
}
ANSWER_EXAMPLE = r"<answer>The final answer is \[ \boxed{67} \]</answer>"


def build_system_prompt(config: EnvironmentSection, tools: Sequence[Tool]) -> str:
    """The system prompt; empty if the model needs none."""
    if config.system_prompt is not None:
        return config.system_prompt.replace("{tools}", describe_tools(tools))
    if config.prompt == "none":
        return ""
    if config.protocol == "native":
        return (NATIVE_WITH_TOOLS if tools else NATIVE_WITHOUT_TOOLS).format()
    if config.prompt == "brief":
        names = ", ".join(f"<{each.name}></{each.name}>" for each in tools)
        calls = f" Tools: {names}; their output comes in <result></result>." if tools else ""
        return TAGS_BRIEF.format(calls=calls)
    template = TAGS_WITH_TOOLS if tools else TAGS_WITHOUT_TOOLS
    return template.format(tools=describe_tools(tools), example=write_example(tools))


def describe_tools(tools: Sequence[Tool]) -> str:
    """One line for each tool: its tag, what goes in it, and what it does."""
    return "\n".join(f"- <{each.name}>{describe_input(each)}</{each.name}>: {each.description}" for each in tools)


def describe_input(tool: Tool) -> str:
    """What the text of a tag is: one argument, or a JSON object of arguments."""
    if tool.text_argument is not None:
        return tool.text_argument
    return json.dumps({name: each.get("type", "any") for name, each in tool.parameters.get("properties", {}).items()})


def write_example(tools: Sequence[Tool]) -> str:
    """A worked example with at most two of the tools."""
    steps = []
    for tool in tools[:2]:
        text = EXAMPLE_INPUTS.get(tool.name, describe_input(tool))
        steps.append(f"<think>What I need next, and why.</think>\n<{tool.name}>{text}</{tool.name}>")
        steps.append("<result>\nwhat the tool returns\n</result>")
    return "\n".join([*steps, f"<think>What follows from it.</think>\n{ANSWER_EXAMPLE}"])
