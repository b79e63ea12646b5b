"""Rounds of a pipeline file become stages: each round refers to its own stages and to the model of the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunesmith.cli import app
from tunesmith.commands.run.config import PipelineConfig, load_pipeline, plan_stages
from tunesmith.commands.settings import load_eval_file, load_run_file
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import build_section

AGENT = """
import json
from pathlib import Path

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer

def make(out_dir):
    (out_dir / "model").mkdir()
    tokenizer = build_pocket_tokenizer()
    save_model_files(out_dir / "model", build_pocket_model(tokenizer, hidden_size=96, num_layers=1), tokenizer)
    rows = [{"question": f"{n} apples"} for n in range(6)]
    (out_dir / "pool.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))

async def agent(task, model):
    if Path("stop").exists() and len(list(Path("out").glob("rl_1/global_step_*"))):
        raise KeyboardInterrupt
    completion = await model([{"role": "user", "content": task["question"]}])
    text = completion.choices[0].message.content
    return WorkflowOutput(response=text, metrics={"tool_calls": float(sum(map(ord, text)) % 4)})

async def judge(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response)) % 2))
"""
AGENT_KEYS = {
    "workflow": "agent.py:agent", "judge": "agent.py:judge", "engine": {"kv_cache_tokens": 4096},
    "rollout": {"chat_model": "openai"}, "monitor": {"trackers": [], "has_progress": False},
}  # fmt: skip
MODEL = {"path": "stage:previous", "max_model_len": 64, "max_tokens": 4, "device": "cpu"}
REWARD = {"name": "efficiency_reward", "args": {"sigma_tool": "round:sigma", "sigma_length": 0.1}}
ROUNDS = {
    "kind": "rounds", "count": 2, "start": "stage:make/model", "model": "rl", "values": {"sigma": [0.2, 0.1]},
    "stages": {
        "pass_rate": {
            **AGENT_KEYS, "model": MODEL, "train_dataset": {"path": "stage:make/pool.jsonl"},
            "algorithm": {"batch_size": 6}, "num_runs": 4, "tool_keys": ["tool_calls"], "seed": "round:number",
        },
        "pareto": {"data": "stage:pass_rate/tasks.jsonl", "num_selected": 4},
        "rl": {
            **AGENT_KEYS, "model": MODEL, "train_dataset": {"path": "stage:pareto/train.jsonl"},
            "algorithm": {"batch_size": 2, "group_size": 4}, "total_steps": 1, "experience": {"operators": [REWARD]},
        },
    },
}  # fmt: skip
STAGES = {"make": {"kind": "function", "function": "agent.py:make"}, "curriculum": ROUNDS}


def build(stages):
    return build_section(PipelineConfig, {"folder": "out", "stages": stages})


def test_rounds_become_stages_in_order():
    config = build({**STAGES, "export": {"path": "stage:curriculum"}})
    stages = {stage.name: stage for stage in plan_stages(config)}
    assert list(stages) == [
        "make", "pass_rate_1", "pareto_1", "rl_1", "pass_rate_2", "pareto_2", "rl_2", "export"
    ]  # fmt: skip
    assert stages["rl_1"].values["model"]["path"] == "stage:make/model"
    assert stages["rl_2"].values["model"]["path"] == stages["pass_rate_2"].values["model"]["path"] == "stage:rl_1"
    assert stages["pareto_2"].values["data"] == "stage:pass_rate_2/tasks.jsonl"
    assert stages["pass_rate_2"].values["train_dataset"]["path"] == "stage:make/pool.jsonl"
    sigmas = [stages[f"rl_{n}"].values["experience"]["operators"][0]["args"]["sigma_tool"] for n in (1, 2)]
    assert sigmas == [0.2, 0.1] and stages["pass_rate_2"].values["seed"] == 2
    assert stages["export"].values["path"] == "stage:rl_2"


def test_overrides_change_the_rounds_before_they_are_expanded(tmp_path):
    (tmp_path / "pipeline.yaml").write_text(json.dumps({"folder": "out", "stages": STAGES}))
    overrides = ["stages.curriculum.count=1", "stages.curriculum.values.sigma=[0.4]"]
    stages = {stage.name: stage for stage in plan_stages(load_pipeline(tmp_path / "pipeline.yaml", overrides))}
    assert list(stages)[-1] == "rl_1"
    assert stages["rl_1"].values["experience"]["operators"][0]["args"]["sigma_tool"] == 0.4


@pytest.mark.parametrize("load", [load_run_file, load_eval_file])
def test_a_pipeline_given_to_another_command_is_named_as_one(load):
    with pytest.raises(ConfigError, match=r"is a pipeline file: `tunesmith run .*pocket.yaml`"):
        load(Path(__file__).parents[3] / "recipes/et_agent/pocket.yaml")


def test_a_run_file_given_as_a_pipeline_is_named_as_one():
    with pytest.raises(ConfigError, match=r"guess.yaml has no stages, so it is no pipeline file; `tunesmith tune`"):
        load_pipeline(Path(__file__).parents[3] / "recipes/text_game/guess.yaml")


def test_another_round_leaves_the_earlier_ones_as_they_are():
    def list_digests(count):
        rounds = ROUNDS | {"count": count, "values": {"sigma": [0.2, 0.1, 0.05]}}
        return {each.name: each.digest for each in plan_stages(build({**STAGES, "curriculum": rounds}))}

    two, three = list_digests(2), list_digests(3)
    assert {name: three[name] for name in two} == two and len(three) == len(two) + 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 3}, "stages.curriculum: values.sigma has 2 values for 3 rounds"),
        ({"model": "grpo"}, "stages.curriculum: model='grpo' is not a stage of a round; they are pass_rate, pareto"),
        ({"count": 0}, "stages.curriculum: count must be greater than or equal to 1, got 0"),
        ({"values": {}}, "'round:sigma': values has no 'sigma'"),
        ({"values": {"number": [1, 2]}}, "values.number cannot be set"),
        ({"rounds": 2}, "stages.curriculum: rounds is not a known key"),
        ({"stages": ROUNDS["stages"] | {"previous": {}}}, "cannot be named 'previous'"),
    ],
)
def test_invalid_rounds_are_errors_that_name_the_entry(changes, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        build({**STAGES, "curriculum": ROUNDS | changes})


def test_names_of_rounds_cannot_be_taken():
    with pytest.raises(ConfigError, match="stages.curriculum has a stage 'rl_1', which is already the name"):
        build({**STAGES, "rl_1": {"kind": "export", "path": "x"}})


def test_an_unknown_key_in_a_round_is_an_error_of_its_stage():
    stages = ROUNDS["stages"] | {"pareto": {"data": "x", "number": 3}}
    with pytest.raises(ConfigError, match="stages.pareto_1"):
        build({**STAGES, "curriculum": ROUNDS | {"stages": stages}})


def test_a_curriculum_runs_is_killed_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "pipeline.yaml").write_text(json.dumps({"folder": "out", "stages": STAGES}))
    (tmp_path / "stop").write_text("")
    CliRunner().invoke(app, ["run", "pipeline.yaml"])
    states = tmp_path / "out" / "stages"
    assert (states / "rl_1/DONE.json").exists() and not (states / "pass_rate_2/DONE.json").exists()
    (tmp_path / "stop").unlink()
    result = CliRunner().invoke(app, ["run", "pipeline.yaml"])
    assert result.exit_code == 0, result.output
    assert "rl_1: already done, skipped" in result.output and "pass_rate_2: resumed" in result.output
    assert (tmp_path / "out/rl_2/global_step_1/DONE.json").exists()
    metrics = [json.loads((tmp_path / f"out/rl_{n}/metrics.jsonl").read_text().splitlines()[0]) for n in (1, 2)]
    assert [each["experience/efficiency_reward/sigma_tool"] for each in metrics] == [0.2, 0.1]
