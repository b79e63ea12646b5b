"""Prompts are scored without failed runs, each run once; the result says whether the tuned prompt is better."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import pickle

import pytest

import tunesmith
from tunesmith import DatasetConfig, JudgeOutput, PromptTuneConfig, PromptTuneResult, TunerModelConfig, WorkflowOutput
from tunesmith.commands.candidates import Candidate, RunLimits
from tunesmith.commands.eval.sample_scores import compare_paired
from tunesmith.commands.tune_prompt.prompt_runs import (
    HeldOutScores,
    PromptRuns,
    PromptScore,
    Teacher,
    compute_improvement,
)
from tunesmith.commands.tune_prompt.tune import choose_proposer
from tunesmith.errors import ConfigError, DataError, RolloutError
from tunesmith.rollout.service import ExternalModel
from tunesmith.runs.policy import LoadedModel
from tunesmith.types import Task

calls: list[tuple[int, str]] = []


async def workflow(task, system_prompt):
    calls.append((task["number"], system_prompt))
    if task["number"] in {"fails on 0": [0], "fails": range(9)}.get(system_prompt, ()):
        raise RuntimeError("boom")
    return WorkflowOutput(response=system_prompt)


async def judge(task, response):
    return JudgeOutput(reward=task["number"] - 1.5)


def build_runs(max_failure_rate=0.5):
    calls.clear()
    lines: list[str] = []
    runs = PromptRuns(
        tasks=[Task(task_id=f"t/{number}", index=number, row={"number": number}) for number in range(4)],
        workflow=workflow,
        judge=judge,
        model=LoadedModel(provider=ExternalModel(None)),
        limits=RunLimits(max_threads=2, timeout_s=60.0, max_failure_rate=max_failure_rate, seed=1),
        show=lines.append,
    )
    return runs, lines


def test_the_score_of_a_prompt_leaves_out_failed_runs():
    runs, lines = build_runs()
    assert asyncio.run(runs.score("first", range(4))) == 0.0
    assert asyncio.run(runs.score("fails on 0", range(4))) == 0.5  # not 0.25 x (0 - 0.5 + 0.5 + 1.5)
    assert lines[-1] == "prompt 1: reward 0.5 on 4 tasks, 1 failed"
    assert runs.list_scores()[1].num_failures == 1 and "boom" in runs.list_scores()[1].causes[0]


def test_a_prompt_is_run_once_on_each_task():
    runs, _ = build_runs()
    asyncio.run(runs.run("first", [2]))
    for _ in range(2):
        asyncio.run(runs.score("first", [1, 2, 3]))
    assert sorted(calls) == [(1, "first"), (2, "first"), (3, "first")]
    assert runs.num_runs == 3 and runs.list_scores()[0].num_runs == 3


def test_runs_that_are_not_scored_are_not_part_of_a_score():
    runs, _ = build_runs()
    asyncio.run(runs.run("first", [0]))
    asyncio.run(runs.score("first", [3]))
    assert runs.list_scores()[0].reward == 1.5


def test_a_prompt_with_too_many_failures_is_never_the_best_and_the_first_one_raises():
    runs, _ = build_runs()
    asyncio.run(runs.score("first", range(4)))
    assert asyncio.run(runs.score("fails", range(4))) == -math.inf
    with pytest.raises(RolloutError, match=r"(?s)the initial prompt cannot be evaluated: 4 of 4 rollouts failed.*boom"):
        asyncio.run(build_runs()[0].score("fails", range(4)))


def build_result(before, after, *, prompt="new"):
    scores = [
        PromptScore(prompt=text, reward=sum(rewards) / len(rewards), num_runs=len(rewards), num_failures=0, causes=())
        for text, rewards in (("old", before), ("new", after))
    ]
    difference = compare_paired(before, after, seed=1)
    held_out = HeldOutScores(initial=scores[0], tuned=scores[1], difference=difference)
    return PromptTuneResult.build(prompt, initial_prompt="old", candidates=scores, num_runs=9, held_out=held_out)


def test_the_result_is_a_pair_and_says_whether_the_prompt_is_better():
    better = build_result([0.0] * 8, [1.0] * 8)
    prompt, metrics = better
    assert (prompt, metrics["eval_reward_initial"], metrics["eval_reward_tuned"]) == ("new", 0.0, 1.0)
    assert better.is_improved and better.describe().startswith("Improvement on 8 held-out tasks")
    unclear = build_result([0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0])
    assert not unclear.is_improved and unclear.describe().startswith("No significant improvement")
    worse = build_result([1.0] * 4, [0.0, 0.0, 0.5, 1.0])
    assert not worse.is_improved and worse.describe().startswith("No improvement on 4 held-out tasks")
    assert worse.metrics["valset_improvement"] == -62.5
    same = build_result([1.0] * 4, [1.0] * 4, prompt="old")
    copied = pickle.loads(pickle.dumps(better))
    assert copied == better and copied.candidates == better.candidates and copied.describe() == better.describe()
    assert same.is_improved is False and "none of 1 other prompts" in same.describe()


def test_improvement_in_percent_is_of_the_size_of_the_initial_reward():
    assert compute_improvement(0.1, 0.4) == pytest.approx(25.0)
    assert compute_improvement(0.5, -2.0) == 25.0  # from -2 to -1.5
    assert compute_improvement(0.0, 0.0) == 0.0
    assert compute_improvement(0.5, 0.0) == math.inf


def test_who_proposes_prompts(monkeypatch):
    student = Candidate(label="model", given=workflow, source=workflow)
    named = PromptTuneConfig(lm_model_name="q", lm_base_url="http://x/v1", lm_api_key_env="PROPOSER_KEY")
    assert choose_proposer(PromptTuneConfig(), None, None) is None
    assert choose_proposer(PromptTuneConfig(), student, None) is student
    assert choose_proposer(named, student, workflow) is student
    assert choose_proposer(named, student, judge).given is judge
    with pytest.raises(ConfigError, match="the environment variable PROPOSER_KEY is not set"):
        choose_proposer(named, student, None)
    monkeypatch.setenv("PROPOSER_KEY", "k")
    assert choose_proposer(named, student, None) is None


def test_the_proposing_model_may_be_any_chat_model():
    class Reply:
        def __init__(self, content):
            self.content = content

    async def blocks(messages):
        return Reply([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": messages[0]["content"] + "!"}])

    async def stream(messages):
        async def chunks():
            yield Reply("a")
            yield Reply("a prompt")

        return chunks()

    async def nothing(messages):
        return None

    def ask(model):
        return asyncio.run(Teacher(LoadedModel(provider=ExternalModel(model)), seed=1).ask([{"content": "x"}], {}))

    assert ask(blocks) == "x!" and ask(stream) == "a prompt"
    with pytest.raises(RolloutError, match="the model that proposes prompts failed: TypeError"):
        ask(nothing)


@pytest.fixture
def dataset(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"number": number}) + "\n" for number in range(4)))
    return DatasetConfig(path=str(tmp_path / "train.jsonl"))


def tune_prompt(dataset, **given):
    arguments = {"workflow": workflow, "init_system_prompt": "first", "judge_func": judge, "train_dataset": dataset}
    return tunesmith.tune_prompt(**arguments | given)


@pytest.mark.skipif(importlib.util.find_spec("dspy") is not None, reason="DSPy is installed")
def test_without_dspy_the_error_names_the_extra(dataset):
    with pytest.raises(ConfigError, match=r"tune_prompt needs dspy.*pip install 'tunesmith\[prompt\]'"):
        tune_prompt(dataset)


async def with_model(task, system_prompt, model):
    return WorkflowOutput(response="x")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"init_system_prompt": " "}, ConfigError, "init_system_prompt is empty"),
        ({"workflow": with_model}, ConfigError, "the workflow has a parameter `model`: give"),
        ({"model": with_model}, ConfigError, "model has no effect: the workflow has no parameter `model`"),
        ({"workflow": judge}, ValueError, r"Missing essential parameters: \['system_prompt'\]"),
        ({"judge_func": workflow}, ValueError, r"Missing essential parameters: \['response'\]"),
        ({"train_dataset": DatasetConfig(path="./none.jsonl")}, DataError, "none.jsonl"),
        (
            {"workflow": with_model, "model": TunerModelConfig(model_path="./none", max_model_len=9)},
            ValueError,
            "./none",
        ),
    ],
)
def test_wrong_arguments_are_refused(dataset, given, error, message, monkeypatch):
    monkeypatch.setattr("tunesmith.commands.tune_prompt.tune.check_dspy", lambda: None)
    with pytest.raises(error, match=message):
        tune_prompt(dataset, **given)


def test_one_task_is_too_few(dataset, monkeypatch):
    monkeypatch.setattr("tunesmith.commands.tune_prompt.tune.check_dspy", lambda: None)
    with pytest.raises(DataError, match="train_dataset has 1 row; tune_prompt needs at least 2"):
        tune_prompt(DatasetConfig(path=dataset.path, total_steps=1))
