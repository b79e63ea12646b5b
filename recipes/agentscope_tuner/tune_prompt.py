"""Tunes the system prompt of a ReActAgent: AgentScope's `tune_prompt` with one import line changed.

MODEL is a model folder or hub id, or with BASE_URL a model's name on an OpenAI-compatible server. PROMPT_MODEL, a
folder or name too, proposes the prompts; by default it is MODEL.
"""

import os

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg

import tunesmith.compat.agentscope as tuner

DATASET = os.environ.get("DATASET", "my_dataset")


def choose_model(name: str) -> tuner.TunerModelConfig:
    where = {"base_url": os.environ["BASE_URL"]} if "BASE_URL" in os.environ else {}
    return tuner.TunerModelConfig(model_path=name, max_model_len=2048, max_tokens=512, **where)


async def workflow(task, system_prompt, model):
    agent = ReActAgent(name="agent", sys_prompt=system_prompt, model=model, formatter=OpenAIChatFormatter())
    return tuner.WorkflowOutput(response=await agent.reply(Msg("user", task["question"], role="user")))


async def judge(task, response):
    return tuner.JudgeOutput(reward=float(task["answer"] in (response.get_text_content() or "")))


if __name__ == "__main__":
    student = choose_model(os.environ.get("MODEL", "Qwen/Qwen3-0.6B"))
    proposer = choose_model(os.environ["PROMPT_MODEL"]) if "PROMPT_MODEL" in os.environ else student
    result = tuner.tune_prompt(
        workflow=workflow,
        init_system_prompt="You are a helpful math problem solving agent.",
        judge_func=judge,
        train_dataset=tuner.DatasetConfig(path=DATASET, split="train"),
        eval_dataset=tuner.DatasetConfig(path=DATASET, split="test"),
        config=tuner.PromptTuneConfig(optimization_level=os.environ.get("LEVEL", "light")),
        model=student,
        prompt_model=proposer,
    )
    prompt, metrics = result
    print(prompt, metrics, sep="\n")
