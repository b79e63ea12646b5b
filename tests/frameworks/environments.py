"""The frameworks under test: pinned packages, recipes, and what a scripted model replies to each agent."""

from __future__ import annotations

from dataclasses import dataclass

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ANSWER = "The sum is 5."
FINAL_ANSWER = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "5"}}\n</tool_call>'
FORCED = '<tool_call>\n{"name": "'
"""Start of a reply to a request with `tool_choice: required`, which is not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One agent under test."""

    name: str
    environment: str
    recipe: str
    function: str = "workflow"
    packages: tuple[str, ...]
    """Pinned packages of the environment; the first is the one that the table names."""
    replies: tuple[str, ...] = (CALL, ANSWER)


SMOLAGENTS = ("smolagents[openai]==1.26.0",)
FRAMEWORKS = (
    Framework(name="OpenAI SDK, chat completions", environment="openai", recipe="openai_chat",
              packages=("openai==3.54.0", "anthropic==2.12.0")),
    Framework(name="OpenAI SDK, Responses API", environment="openai", recipe="openai_responses",
              packages=("openai==3.54.0", "anthropic==2.12.0")),
    Framework(name="Anthropic SDK, Messages API", environment="openai", recipe="anthropic_sdk",
              packages=("anthropic==2.12.0", "openai==3.54.0")),
    Framework(name="OpenAI Agents SDK, chat completions", environment="openai_agents", recipe="openai_agents",
              packages=("openai-agents==0.24.0",)),
    Framework(name="OpenAI Agents SDK, Responses API", environment="openai_agents", recipe="openai_agents",
              function="responses_workflow", packages=("openai-agents==0.24.0",)),
    Framework(name="LangGraph", environment="langgraph", recipe="langgraph_agent",
              packages=("langgraph==1.2.22", "langchain-openai==1.7.3")),
    Framework(name="pydantic-ai", environment="pydantic_ai", recipe="pydantic_ai_agent",
              packages=("pydantic-ai-slim[openai]==2.68.0",)),
    Framework(name="smolagents, tool-calling agent", environment="smolagents", recipe="smolagents_agent",
              packages=SMOLAGENTS,
              replies=(CALL.removeprefix(FORCED), FINAL_ANSWER.removeprefix(FORCED))),
    Framework(name="smolagents, code agent", environment="smolagents", recipe="smolagents_agent",
              function="code_workflow", packages=SMOLAGENTS,
              replies=("Thought: add\n<code>\nprint(add(2, 3))\n", "Thought: done\n<code>\nfinal_answer(5)\n")),
)  # fmt: skip
