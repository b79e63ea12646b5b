"""The frameworks under test: pinned packages, recipes, and what a scripted model replies to each agent."""

from __future__ import annotations

from dataclasses import dataclass

from cases import ADD, ANSWER, write_call


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One agent under test."""

    name: str
    environment: str
    recipe: str
    function: str = "workflow"
    features: str
    """Module of `features/` with the agents for each feature."""
    cases: str = "CASES"
    """Its tuple of cases."""
    absent: str = "ABSENT"
    """Its features that the framework does not have, each with the reason; empty: it has no such concept."""
    packages: tuple[str, ...]
    """Pinned packages of the environment; the first is the one that the table names."""
    replies: tuple[str, ...] = (ADD, ADD, ADD, ANSWER)
    chat_model: str = "openai"
    """Class of the `model` that the workflow receives, as in `rollout.chat_model`."""
    is_http: bool = False
    """The recipe calls the model by `model.base_url`, so the endpoint is served over HTTP."""


FINAL_ANSWER = write_call("final_answer", answer="5")
SMOLAGENTS = ("smolagents[openai]==1.26.0",)
STEP = "[[ ## next_thought ## ]]\nYes.\n\n[[ ## next_tool_name ## ]]\n{}\n\n[[ ## next_tool_args ## ]]\n{}\n\n{}"
COMPLETED = "[[ ## completed ## ]]"
DSPY_REPLIES = (
    *3 * (STEP.format("add", '{"a": 2, "b": 3}', COMPLETED),),
    STEP.format("finish", "{}", COMPLETED),
    f"[[ ## reasoning ## ]]\n2 + 3 = 5.\n\n[[ ## answer ## ]]\n5\n\n{COMPLETED}",
)
FRAMEWORKS = (
    Framework(name="OpenAI SDK, chat completions", environment="openai", recipe="openai_chat", features="openai_sdk",
              packages=("openai==3.54.0", "anthropic==2.12.0")),
    Framework(name="OpenAI SDK, Responses API", environment="openai", recipe="openai_responses", features="openai_sdk",
              cases="RESPONSES_CASES", absent="RESPONSES_ABSENT",
              packages=("openai==3.54.0", "anthropic==2.12.0")),
    Framework(name="Anthropic SDK, Messages API", environment="openai", recipe="anthropic_sdk",
              features="anthropic_sdk",
              packages=("anthropic==2.12.0", "openai==3.54.0")),
    Framework(name="OpenAI Agents SDK, chat completions", environment="openai_agents", recipe="openai_agents",
              features="openai_agents",
              packages=("openai-agents==0.24.0",)),
    Framework(name="OpenAI Agents SDK, Responses API", environment="openai_agents", recipe="openai_agents",
              features="openai_agents",
              function="responses_workflow", cases="RESPONSES_CASES", packages=("openai-agents==0.24.0",)),
    Framework(name="LangGraph", environment="langgraph", recipe="langgraph_agent", features="langgraph_agents",
              packages=("langgraph==1.2.22", "langchain-openai==1.7.3", "langchain==1.4.7")),
    Framework(name="pydantic-ai", environment="pydantic_ai", recipe="pydantic_ai_agent", features="pydantic_ai_agents",
              packages=("pydantic-ai-slim[openai]==2.68.0",)),
    Framework(name="smolagents, tool-calling agent", environment="smolagents", recipe="smolagents_agent",
              features="smolagents_agents",
              packages=SMOLAGENTS,
              replies=(ADD, ADD, ADD, FINAL_ANSWER)),
    Framework(name="smolagents, code agent", environment="smolagents", recipe="smolagents_agent",
              features="smolagents_agents",
              function="code_workflow", cases="CODE_CASES", absent="CODE_ABSENT", packages=SMOLAGENTS,
              replies=(*3 * ("Thought: add\n<code>\nprint(add(2, 3))\n</code>",),
                       "Thought: done\n<code>\nfinal_answer(5)\n</code>")),
    Framework(name="AgentScope 1, ReActAgent", environment="agentscope1", recipe="agentscope_react",
              features="agentscope1",
              packages=("agentscope==1.0.21", "mcp<2", "openai<3"), chat_model="agentscope"),
    Framework(name="AgentScope 2, Agent", environment="agentscope2", recipe="agentscope_agent", features="agentscope2",
              packages=("agentscope==2.0.10",), chat_model="agentscope"),
    Framework(name="DSPy, ReAct through LiteLLM", environment="dspy", recipe="dspy_react", features="dspy_programs",
              packages=("dspy==3.4.1",), replies=DSPY_REPLIES, is_http=True),
    Framework(name="Google ADK through LiteLLM", environment="google_adk", recipe="google_adk_agent",
              features="google_adk_agents",
              packages=("google-adk==2.13.0", "litellm==1.106.2", "mcp==2.3.0"), is_http=True),
    Framework(name="CrewAI through LiteLLM", environment="crewai", recipe="crewai_agent", features="crewai_agents",
              packages=("crewai[litellm]==1.15.30", "litellm==1.105.3"), is_http=True),
    Framework(name="AutoGen, AssistantAgent", environment="autogen", recipe="autogen_agent",
              features="autogen_agents",
              packages=("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5", "tensorboard==2.19.0")),
)  # fmt: skip
