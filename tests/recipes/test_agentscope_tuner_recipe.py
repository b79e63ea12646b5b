"""Programs written for `agentscope.tuner` run with its name replaced, and the recipe runs on the pocket model."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers import AutoTokenizer

from chat_servers import ChatServer, build_completion
from tunesmith.experience.store import load_rollouts
from tunesmith.monitor.metrics_file import load_metrics

pytest.importorskip("agentscope", reason="needs AgentScope, which the extra `agentscope` installs")
needs_dspy = pytest.mark.skipif(
    importlib.util.find_spec("dspy") is None or importlib.util.find_spec("optuna") is None,
    reason="needs DSPy, which the extra `prompt` installs",
)

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "agentscope_tuner"
COMMON = """
import asyncio
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import OpenAIChatModel

def build_model(name):
    return OpenAIChatModel(name, api_key="EMPTY", stream=False, client_kwargs={"base_url": "BASE_URL"})

def build_agent(prompt, model):
    agent = ReActAgent(name="agent", sys_prompt=prompt, model=model, formatter=OpenAIChatFormatter())
    agent.set_console_output_enabled(False)
    return agent
"""
TUNE = """
from agentscope.tuner import (
    tune, AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, check_workflow_function,
)

async def workflow(task, model, auxiliary_models):
    return WorkflowOutput(response=await build_agent("Answer.", model).reply(Msg("user", task["question"], "user")))

async def judge(task, response, auxiliary_models, logger):
    text = response.get_text_content()
    return JudgeOutput(reward=len(text) % 5 / 4, metrics={"length": len(text)})

check_workflow_function(workflow)
result = tune(
    workflow_func=workflow,
    judge_func=judge,
    train_dataset=DatasetConfig(path="DATASET", split="train", total_steps=1),
    model=TunerModelConfig(model_path="POCKET", max_model_len=256, max_tokens=8),
    algorithm=AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=2, batch_size=2, learning_rate=1e-6),
)
"""
GAME = """
from agentscope.pipeline import MsgHub
from agentscope.tuner import tune, Algorithm, Dataset, JudgeOutput, TunerChatModel, WorkflowOutput

async def workflow(task, model):
    players = [build_agent(f"You are player {name}.", model) for name in ("A", "B")]
    async with MsgHub(players):
        await players[0].reply(Msg("host", task["question"], "user"))
        return WorkflowOutput(response=await players[1].reply(Msg("host", "Your turn.", "user")))

async def judge(task, response):
    from trinity.common.rewards.math_reward import MathBoxedRewardFn
    scores = MathBoxedRewardFn()(response=response.get_text_content(), truth=task["answer"])
    return JudgeOutput(reward=sum(scores.values()), metrics=scores)

result = tune(
    workflow_func=workflow,
    judge_func=judge,
    train_dataset=Dataset(path="DATASET", split="train", total_steps=1),
    model=TunerChatModel(model_path="POCKET", max_model_len=256, max_tokens=8),
    algorithm=Algorithm(group_size=2, batch_size=2),
)
"""
SELECT = """
from agentscope.tuner import DatasetConfig, JudgeOutput, WorkflowOutput, select_model
from agentscope.tuner.model_selection import avg_token_consumption_judge

async def workflow(task, model):
    return WorkflowOutput(response=await build_agent("Answer.", model).reply(Msg("user", task["question"], "user")))

async def judge(task, response):
    assert set(response["metrics"]) >= {"execution_time", "input_tokens", "output_tokens", "total_tokens"}
    is_right = task["answer"] in response["response"].get_text_content()
    return JudgeOutput(reward=float(is_right), metrics={"accuracy": float(is_right)})

async def main(judge):
    return await select_model(
        workflow_func=workflow,
        judge_func=judge,
        train_dataset=DatasetConfig(path="DATASET", split="train", total_steps=4),
        candidate_models=[build_model("terse"), build_model("right"), build_model("down")],
    )

best, metrics = asyncio.run(main(judge))
cheapest, tokens = asyncio.run(main(avg_token_consumption_judge))
"""
PROMPT = """
from agentscope.tuner import DatasetConfig, JudgeOutput, PromptTuneConfig, WorkflowOutput, tune_prompt

async def workflow(task, system_prompt):
    agent = build_agent(system_prompt, build_model("obedient"))
    return WorkflowOutput(response=await agent.reply(Msg("user", task["question"], "user")))

async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response.get_text_content()))

prompt, metrics = tune_prompt(
    workflow=workflow,
    init_system_prompt="Answer.",
    judge_func=judge,
    train_dataset=DatasetConfig(path="DATASET/train.jsonl"),
    eval_dataset=DatasetConfig(path="DATASET/test.jsonl"),
    config=PromptTuneConfig(lm_model_name="openai/proposer", optimization_level="light"),
)
"""


async def answer(request: Request) -> JSONResponse:
    """Each model answers in its own way."""
    body = await request.json()
    name, text = body["model"], json.dumps(body["messages"])
    if name == "down":
        return JSONResponse({"error": {"message": "out of memory"}}, status_code=400)
    replies = {"terse": "no", "right": "It is 5.", "proposer": "Say 5.", "obedient": "It is 5." * ("Say 5" in text)}
    reply = replies[name] or "I do not know."
    num_tokens = {"prompt_tokens": 10, "completion_tokens": len(reply), "total_tokens": 11}
    return JSONResponse(build_completion(name, reply) | {"usage": num_tokens})


@pytest.fixture(scope="module")
def server():
    server = ChatServer(answer)
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        rows = [{"question": f"What is {n} + {5 - n}?", "answer": "5"} for n in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run_program(text, folder, *, url="", pocket=""):
    """Run a program after replacing the name of AgentScope's module in its imports."""
    text = (COMMON + text).replace("from agentscope.tuner", "from tunesmith.compat.agentscope")
    text = text.replace("trinity.common.rewards.math_reward", "tunesmith.compat.trinity_rewards")
    text = text.replace("BASE_URL", url).replace("POCKET", pocket).replace("DATASET", str(folder))
    (folder / "program.py").write_text(text)
    return runpy.run_path(str(folder / "program.py"))


def test_a_program_of_tune_trains(folder, pocket_folder):
    result = run_program(TUNE, folder, pocket=pocket_folder)["result"]
    (record,) = load_metrics(result.run_folder / "metrics.jsonl")
    assert record["rollout/num_failed"] == 0.0 and record["rollout/length/mean"] > 0
    assert record["train/grad_norm"] > 0


def test_a_game_of_two_agents_records_the_calls_of_each(folder, pocket_folder):
    result = run_program(GAME, folder, pocket=pocket_folder)["result"]
    groups = load_rollouts(result.run_folder / "rollouts" / "step_000001.parquet")
    trajectories = [each for group in groups for each in group.trajectories]
    assert len(trajectories) == 4 and all(each.reward == 0.0 and each.failure is None for each in trajectories)
    assert {tuple(each.metrics) for each in trajectories} >= {("accuracy", "format_score")}
    tokenizer = AutoTokenizer.from_pretrained(pocket_folder)
    for each in trajectories:
        prompts = [tokenizer.decode(turn.prompt_ids) for turn in each.turns]
        assert [("player A" in text, "player B" in text) for text in prompts] == [(True, False), (False, True)]


def test_a_program_of_select_model_selects(folder, server):
    outcome = run_program(SELECT, folder, url=server.url)
    assert outcome["best"].model_name == "right" and outcome["metrics"]["accuracy_avg"] == 1.0
    assert outcome["cheapest"].model_name == "terse"
    assert outcome["tokens"]["token_consumed_avg"] == 12.0


@needs_dspy
def test_a_program_of_tune_prompt_tunes(folder, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    monkeypatch.setenv("OPENAI_API_BASE", server.url)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no network
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    outcome = run_program(PROMPT, folder, url=server.url)
    assert outcome["prompt"] == "Say 5."
    assert outcome["metrics"]["eval_reward_tuned"] == 1.0 and outcome["metrics"]["eval_reward_initial"] == 0.0


def test_the_recipe_selects_a_model(folder, server, monkeypatch, capsys):
    monkeypatch.setenv("BASE_URL", server.url)
    monkeypatch.setenv("MODELS", "terse,right")
    monkeypatch.setenv("JUDGE", "tokens")
    monkeypatch.setenv("DATASET", str(folder))
    runpy.run_path(str(RECIPE / "select_model.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "terse" and "'token_consumed_avg': 12.0" in lines[1]


@needs_dspy
def test_the_recipe_tunes_a_prompt(folder, server, monkeypatch, capsys):
    monkeypatch.setenv("BASE_URL", server.url)
    monkeypatch.setenv("MODEL", "obedient")
    monkeypatch.setenv("PROMPT_MODEL", "proposer")
    monkeypatch.setenv("DATASET", str(folder))
    runpy.run_path(str(RECIPE / "tune_prompt.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-2] == "Say 5."


@pytest.mark.parametrize("name", ["tune_prompt.py", "select_model.py"])
def test_programs_of_the_recipe_are_short(name):
    assert len((RECIPE / name).read_text().splitlines()) <= 60
