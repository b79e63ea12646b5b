"""Selects the best of several models for a ReActAgent: AgentScope's `select_model` with one import line changed.

MODELS are model folders, run folders or hub ids, separated by commas, or with BASE_URL names of models on an
OpenAI-compatible server. JUDGE is `answer`, `time` or `tokens`.
"""

import asyncio
import os

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg

import tunesmith.compat.agentscope as tuner
from tunesmith.compat.agentscope.model_selection import avg_time_judge, avg_token_consumption_judge


def choose_model(name: str) -> tuner.TunerModelConfig:
    where = {"base_url": os.environ["BASE_URL"]} if "BASE_URL" in os.environ else {}
    return tuner.TunerModelConfig(model_path=name, max_model_len=2048, max_tokens=512, **where)


async def workflow(task, model):
    agent = ReActAgent(
        name="agent", sys_prompt="You solve math problems.", model=model, formatter=OpenAIChatFormatter()
    )
    return tuner.WorkflowOutput(response=await agent.reply(Msg("user", task["question"], role="user")))


async def judge_answer(task, response):
    answer = response["response"].get_text_content() or ""
    return tuner.JudgeOutput(reward=float(task["answer"] in answer), metrics={"characters": len(answer)})


JUDGES = {"answer": judge_answer, "time": avg_time_judge, "tokens": avg_token_consumption_judge}


async def main():
    selection = await tuner.select_model(
        workflow_func=workflow,
        judge_func=JUDGES[os.environ.get("JUDGE", "answer")],
        train_dataset=tuner.DatasetConfig(path=os.environ.get("DATASET", "my_dataset"), split="test", total_steps=100),
        candidate_models=[choose_model(name) for name in os.environ["MODELS"].split(",")],
        max_threads=8,
    )
    best, metrics = selection
    print(best.model_path, metrics, selection.format_table(), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
