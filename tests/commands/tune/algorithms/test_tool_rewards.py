"""`tune()` with rewards computed by operators: they train, follow the run's steps and leave failed rollouts out."""

from __future__ import annotations

import json

import pytest

from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tunesmith.errors import ConfigError
from tunesmith.experience.store import load_rollouts

PLAIN = ("rollout.chat_model=openai", "model.device=cpu", "engine.kv_cache_tokens=8192", "monitor.has_progress=false")
OPERATOR = "experience.operators=[{name: efficiency_reward, args: {sigma_tool: 0.5, sigma_length: 0.2}}]"


async def call_tools(task, model):
    """An agent whose number of tool calls is a function of its sampled text; some rollouts fail."""
    completion = await model([{"role": "user", "content": task["question"]}])
    text = completion.choices[0].message.content
    if sum(map(ord, text)) % 5 == 0:
        raise RuntimeError("the tool's server is down")
    return WorkflowOutput(response=text, metrics={"tool_calls": float(sum(map(ord, text)) % 4)})


async def judge_equally(task, response):
    return JudgeOutput(reward=1.0)


@pytest.fixture
def run(tmp_path, pocket_folder):
    rows = [{"question": f"Tom has {n} apples. How many?", "answer": str(n)} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(*overrides):
        return tune(
            workflow_func=call_tools,
            judge_func=judge_equally,
            model=TunerModelConfig(model_path=pocket_folder, max_model_len=128, max_tokens=6),
            train_dataset=DatasetConfig(path=str(tmp_path), total_steps=3),
            algorithm=AlgorithmConfig(group_size=4, batch_size=2, learning_rate=1e-3),
            experiment_name="x",
            overrides=(*PLAIN, f"checkpoint_root_dir={tmp_path / 'runs'}", "rollout.max_failure_rate=1", *overrides),
        )

    return call


def test_the_efficiency_reward_trains_where_equal_rewards_do_not(run):
    result = run(OPERATOR)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["experience/efficiency_reward/sigma_tool"] for line in steps] == [0.5, 0.25, 0.0]
    assert [line["rollout/reward_std"] for line in steps] == [0.0] * 3
    assert steps[0]["algorithm/num_trained_groups"] > 0 and steps[0]["train/grad_norm"] > 0
    assert steps[2]["algorithm/num_trained_groups"] == 0, "with sigma 0 only the equal judge's rewards are left"
    files = sorted((result.folder / "rollouts").glob("*.parquet"))
    runs = [trajectory for file in files for group in load_rollouts(file) for trajectory in group.trajectories]
    assert any(each.failure is not None for each in runs)
    assert {each.reward for each in runs} == {1.0, None}
    assert steps[0]["experience/efficiency_reward/tool_calls_mean"] == pytest.approx(
        steps[0]["rollout/tool_calls/mean"]
    )


def test_a_tool_metric_that_the_agent_does_not_report_stops_the_run(run):
    with pytest.raises(ConfigError, match="'search_calls', which none of .* rollouts reports"):
        run("experience.operators=[{name: arpo_reward, args: {tool_keys: [tool_calls, search_calls]}}]")
