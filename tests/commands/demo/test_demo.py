"""The demo with small settings, and demonstrations that use the agent's own prompt."""

from __future__ import annotations

import asyncio
import json

import pytest

from tunesmith.commands.demo.run import run_command
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.errors import ConfigError
from tunesmith.experience.store import load_rollouts
from tunesmith.judges.numeric import read_text
from tunesmith.model.load import load_tokenizer
from tunesmith.tasks.arithmetic import build_problems

pytest.importorskip("agentscope")

TINY = (
    "num_demonstrations=8 num_epochs=1 num_train_tasks=12 num_test_tasks=3 num_steps=2 batch_size=3 group_size=2 "
    "num_minibatches=3"
)


def run_tiny(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNESMITH_SET", TINY)
        return json.loads(run_command(seed=0, out=str(out)))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    result = run_tiny(out)
    (root,) = out.iterdir()
    return result, root


def test_the_demo_returns_accuracies_and_seconds(demo):
    result, _ = demo
    assert list(result) == ["base", "sft", "rl", "seconds"]
    assert all(0.0 <= result[name] <= 1.0 for name in ("base", "sft", "rl"))


def test_the_demo_writes_models_data_and_the_run_folder(demo):
    _, root = demo
    stages = {"base", "data", "demonstrations", "sft", "rl", "sampled", "greedy"}
    assert {path.name for path in root.iterdir()} >= stages | {"report.md", "result.json"}
    assert (root / "sft" / "model" / "model.safetensors").is_file()
    assert (root / "rl" / "global_step_2" / "model.safetensors").is_file()


def test_an_interrupted_demo_is_finished_by_the_same_command(demo):
    result, root = demo
    (root / "result.json").unlink()
    steps = (root / "rl" / "metrics.jsonl").read_text()
    again = run_tiny(root.parent)
    assert list(root.parent.iterdir()) == [root]
    assert (root / "rl" / "metrics.jsonl").read_text() == steps
    assert {**again, "seconds": 0} == {**result, "seconds": 0}


def test_demonstrations_start_with_the_agents_prompt(demo):
    from tunesmith.commands.demo.agent import build_demonstrations

    _, root = demo
    tokenizer = load_tokenizer(str(root / "base"))
    reader = ConversationReader(tokenizer)
    problems = {problem.question: problem for problem in build_problems("train", num_problems=12, seed=0)}
    rollouts = load_rollouts(root / "rl" / "rollouts" / "step_000001.parquet")
    for group in rollouts:
        (row,) = build_demonstrations([problems[group.task.row["question"]]], seed=0)
        (sample,) = reader.read([row], max_model_len=512)
        prompt_ids = group.trajectories[0].turns[0].prompt_ids
        assert sample.token_ids[: len(prompt_ids)] == prompt_ids
        assert sample.is_sampled.index(True) == len(prompt_ids)


def test_easy_problems_are_answered_more_often_without_the_tool():
    from tunesmith.commands.demo.agent import SHARE_WITHOUT_TOOL, build_demonstrations

    problems = build_problems("train", num_problems=900, seed=0)
    rows = build_demonstrations(problems, seed=0)
    for num_operations, share in SHARE_WITHOUT_TOOL.items():
        lengths = [
            len(row["messages"]) for row, p in zip(rows, problems, strict=True) if p.num_operations == num_operations
        ]
        assert set(lengths) == {3, 5}
        assert lengths.count(3) / len(lengths) == pytest.approx(share, abs=0.08)


def test_the_tool_returns_the_calculators_result():
    from tunesmith.commands.demo.agent import calculate, judge_answer

    assert read_text({"content": calculate("6 * 7").content}) == "42"
    assert read_text({"content": calculate("6 *").content}).startswith("Error:")
    assert asyncio.run(judge_answer({"answer": "42"}, "The answer is 42.")).reward == 1.0


@pytest.mark.parametrize(("given", "reason"), [("num_step=1", "num_step"), ("num_steps=few", "few")])
def test_wrong_sizes_in_the_variable_are_refused(monkeypatch, tmp_path, given, reason):
    monkeypatch.setenv("TUNESMITH_SET", given)
    with pytest.raises(ConfigError, match=rf"TUNESMITH_SET: .*{reason}"):
        run_command(seed=0, out=str(tmp_path))
    assert not list(tmp_path.iterdir())
