"""An agent of LangGraph with langchain-openai."""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from tunesmith import JudgeOutput, WorkflowOutput


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def workflow(task, model):
    client = model.as_openai_client()
    chat = ChatOpenAI(
        model=model.model_name,
        api_key=model.api_key,
        async_client=client.chat.completions,
        root_async_client=client,
    ).bind_tools([add])

    async def call_model(state):
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("model", call_model).add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    state = await graph.compile().ainvoke({"messages": [HumanMessage(task["question"])]}, {"recursion_limit": 10})
    return WorkflowOutput(response=state["messages"][-1].text)


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
