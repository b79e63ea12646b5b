"""Train a ReAct math agent on tasks chosen by a selector: python main.py --config config_difficulty.yaml"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import ChatModelBase

from tunesmith import JudgeOutput, WorkflowOutput, tune
from tunesmith.judges.numeric import judge_number

SYSTEM_PROMPT = "You solve math problems step by step. Put your final answer in \\boxed{}."


async def run_react_agent(task: Mapping[str, Any], model: ChatModelBase) -> WorkflowOutput:
    """The workflow: ask the agent one question and return its final message."""
    agent = ReActAgent(name="solver", sys_prompt=SYSTEM_PROMPT, model=model, formatter=OpenAIChatFormatter())
    agent.set_console_output_enabled(False)
    return WorkflowOutput(response=await agent.reply(Msg("user", task["question"], role="user")))


async def gsm8k_judge(task: Mapping[str, Any], response: Msg) -> JudgeOutput:
    """The judge: reward 1.0 when the final answer equals the number after `####`, else 0.0."""
    return await judge_number(task, response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="config_random.yaml", help="run file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    tune(
        workflow_func=run_react_agent,
        judge_func=gsm8k_judge,
        config_path=arguments.config,
        overrides=arguments.overrides,
    )


if __name__ == "__main__":
    main()
