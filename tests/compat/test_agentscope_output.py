"""AgentScope's agents print nothing during a run unless configured to, and print as before after it."""

from __future__ import annotations

import json
import os

import pytest

from tunesmith import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from tunesmith.compat.chat_models import OUTPUT_VARIABLE, agent_output

AGENT_NAME = "printing_agent"


@pytest.fixture(autouse=True)
def _no_output_variable(monkeypatch):
    monkeypatch.delenv(OUTPUT_VARIABLE, raising=False)


@pytest.fixture
def run(tmp_path, pocket_folder):
    pytest.importorskip("agentscope.memory", reason="AgentScope 1.x is not installed")
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg

    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Tom has 3 apples.", "answer": "3"}) + "\n")

    async def workflow(task, model):
        agent = ReActAgent(
            name=AGENT_NAME, sys_prompt="Help.", model=model, formatter=OpenAIChatFormatter(), max_iters=1
        )
        await agent(Msg("user", task["question"], "user"))
        return WorkflowOutput(reward=1.0)

    def call(*overrides):
        return tune(
            workflow_func=workflow,
            model=TunerModelConfig(model_path=pocket_folder, max_model_len=1024, max_tokens=4),
            train_dataset=DatasetConfig(path=str(tmp_path), total_steps=1),
            algorithm=AlgorithmConfig(group_size=2, batch_size=1),
            overrides=(
                "model.device=cpu", "engine.kv_cache_tokens=8192", f"checkpoint_root_dir={tmp_path / 'runs'}",
                *overrides,
            ),
        )  # fmt: skip

    return call


def test_agents_are_silent_during_a_run(run, capsys):
    assert run().metrics["rollout/num_failed"] == 0
    assert AGENT_NAME not in capsys.readouterr().out
    assert OUTPUT_VARIABLE not in os.environ


def test_agents_print_if_configured(run, capsys):
    assert run("rollout.has_agent_output=true").metrics["rollout/num_failed"] == 0
    assert AGENT_NAME in capsys.readouterr().out


def test_the_environment_variable_is_kept_unless_the_run_shows_output(monkeypatch):
    monkeypatch.setenv(OUTPUT_VARIABLE, "false")
    with agent_output(is_shown=False) as switch:
        assert os.environ[OUTPUT_VARIABLE] == "false"
    monkeypatch.setenv(OUTPUT_VARIABLE, "true")
    with agent_output(is_shown=False) as switch:
        switch(True)
        assert os.environ[OUTPUT_VARIABLE] == "false"
        switch(False)
        assert os.environ[OUTPUT_VARIABLE] == "true"
    assert os.environ[OUTPUT_VARIABLE] == "true"
