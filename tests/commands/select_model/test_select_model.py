"""Selection of a model: failures are no rewards, candidates are compared on the same tasks, built-in judges work."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

import tunesmith
from tunesmith import DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput
from tunesmith.compat.agentscope.model_selection import avg_time_judge, avg_token_consumption_judge
from tunesmith.errors import ConfigError, DataError, ModelError, RolloutError

NUM_TASKS = 10


class Model:
    """A chat model that answers some of the tasks and raises on others."""

    def __init__(self, name, *, right=(), failing=(), usage=None, is_stream=False):
        self.model_name, self.right, self.failing = name, set(right), set(failing)
        self.usage, self.is_stream, self.num_calls = usage, is_stream, 0

    async def __call__(self, messages):
        self.num_calls += 1
        number = int(messages[-1]["content"])
        if number in self.failing:
            raise RuntimeError(f"{self.model_name} is down")
        text = "yes" if number in self.right else "no"
        return self.stream(text) if self.is_stream else SimpleNamespace(text=text, usage=self.usage)

    async def stream(self, text):
        yield SimpleNamespace(text="", usage=None)
        yield SimpleNamespace(text=text, usage=self.usage)


async def workflow(task, model):
    reply = await model([{"role": "user", "content": str(task["number"])}])
    if getattr(model, "is_stream", False):
        reply = [chunk async for chunk in reply][-1]
    return WorkflowOutput(response=reply.text, metrics={"length": len(reply.text)})


async def judge(task, response):
    is_right = response["response"] == "yes"
    assert response.response == response["response"] and response.metrics["execution_time"] > 0
    return JudgeOutput(reward=float(is_right), metrics={"accuracy": float(is_right)})


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(NUM_TASKS)))
    return DatasetConfig(path=str(path))


@pytest.fixture
def select(dataset):
    def call(*models, judge=judge, **given):
        arguments = {"workflow_func": workflow, "train_dataset": dataset} | given
        return asyncio.run(tunesmith.select_model(judge_func=judge, candidate_models=models, **arguments))

    return call


def test_the_best_model_is_returned_with_its_metrics(select):
    worse, best = Model("worse", right=range(3)), Model("best", right=range(8))
    selection = select(worse, best)
    model, metrics = selection
    assert model is best is selection.model
    assert metrics["accuracy_avg"] == 0.8 and metrics["length_avg"] == 2.8
    assert [each.reward for each in selection.candidates] == [0.3, 0.8]
    lead = selection.candidates[0].lead
    assert (lead.mean, lead.num_better, lead.num_worse, lead.num_tasks) == (0.5, 5, 0, 10)
    assert best.num_calls == NUM_TASKS and type(best) is Model


def test_the_first_of_equal_models_is_selected(select):
    first, second = Model("a", right=range(5)), Model("b", right=range(5, 10))
    assert select(first, second).model is first
    assert select(second, first).model is second


def test_a_model_that_fails_too_often_is_not_selected(select):
    lucky = Model("lucky", right=[0], failing=range(1, 10))  # right on the only task that it does not fail on
    sound = Model("sound", right=range(2))
    selection = select(lucky, sound)
    assert selection.model is sound
    failed, chosen = selection.candidates
    assert (failed.reward, failed.num_failures, failed.num_scored) == (None, 9, 1)
    assert "lucky is down" in failed.causes[0] and failed.causes[0].startswith("9 x workflow")
    assert chosen.reward == 0.2
    assert "not eligible" in selection.format_table() and "9 of 10" in selection.format_table()


def test_models_are_compared_on_the_tasks_that_all_were_scored_on(select):
    skips = Model("skips", right=range(6), failing=[8, 9])  # 6 of its 8 scored tasks
    answers = Model("answers", right=[1, 2, 3, 4, 5, 6, 8, 9])  # 6 of these 8, and those that the other fails on
    selection = select(skips, answers)
    assert selection.num_compared == 8
    assert [each.reward for each in selection.candidates] == [0.75, 0.75]
    assert selection.model is skips
    assert select(skips, answers, max_failure_rate=0.1).model is answers


def test_an_error_names_every_model_if_all_failed(select):
    with pytest.raises(RolloutError, match=r"(?s)max_failure_rate=0.2.*a: 10 of 10.*a is down.*b: 3 of 10.*b is down"):
        select(Model("a", failing=range(10)), Model("b", failing=range(3)))


def test_models_without_a_common_task_cannot_be_compared(select):
    with pytest.raises(RolloutError, match="no task was scored with each of a, b"):
        select(Model("a", failing=range(5)), Model("b", failing=range(5, 10)), max_failure_rate=0.5)


def test_a_judge_that_raises_or_has_no_verdict_gives_no_reward(select):
    async def broken(task, response):
        raise KeyError("gold")

    async def silent(task, response):
        return JudgeOutput(reward=None)

    for each in (broken, silent):
        with pytest.raises(RolloutError, match="10 of 10 failed: 10 x judge"):
            select(Model("a"), Model("b"), judge=each)


def test_fewer_tokens_win_by_the_built_in_judge(select):
    of_agentscope = SimpleNamespace(input_tokens=30, output_tokens=12)
    of_openai = SimpleNamespace(prompt_tokens=20, completion_tokens=5)
    wasteful, frugal = Model("wasteful", usage=of_agentscope), Model("frugal", usage=of_openai, is_stream=True)
    selection = select(wasteful, frugal, judge=avg_token_consumption_judge)
    assert selection.model is frugal
    assert selection.metrics["token_consumed_avg"] == selection.metrics["total_tokens_avg"] == 25.0
    assert [each.reward for each in selection.candidates] == [-42.0, -25.0]


def test_unknown_tokens_are_a_failure_and_not_zero_tokens(select):
    known = Model("known", usage=SimpleNamespace(input_tokens=3, output_tokens=1))
    selection = select(Model("unknown"), known, judge=avg_token_consumption_judge)
    assert selection.model is known
    assert "the tokens of the run are unknown" in selection.candidates[0].causes[0]
    assert "total_tokens_avg" not in selection.candidates[0].metrics


def test_less_time_wins_by_the_built_in_judge(select, passing_time):
    class Slow(Model):
        async def __call__(self, messages):
            passing_time.skip(300)
            return await super().__call__(messages)

    fast = Model("fast")
    selection = select(Slow("slow"), fast, judge=avg_time_judge)
    assert selection.model is fast
    assert selection.candidates[0].metrics["avg_time_seconds_avg"] >= 300
    assert selection.metrics["avg_time_seconds_avg"] == selection.metrics["execution_time_avg"]


def test_built_in_judges_take_agentscopes_arguments():
    response = {"response": "x", "metrics": {"execution_time": 2.0, "usage": {"total_tokens": 7}}}
    assert asyncio.run(avg_time_judge({}, response)).reward == -2.0
    assert asyncio.run(avg_token_consumption_judge(_task={}, response=response)).reward == -7.0
    with pytest.raises(ValueError, match="Missing 'metrics' field in response"):
        asyncio.run(avg_time_judge({}, {"response": "x"}))


def test_total_steps_limits_the_tasks_and_max_threads_the_workflows(select, dataset):
    running, most = 0, 0

    async def counted(task, model):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return WorkflowOutput(response="yes")

    few = DatasetConfig(path=dataset.path, total_steps=4)
    selection = select(Model("a"), Model("b"), workflow_func=counted, train_dataset=few, max_threads=3)
    assert selection.candidates[0].num_tasks == 4 and most == 3


def test_a_plain_function_is_a_workflow_too(select):
    def plain(task, model):
        return WorkflowOutput(response="yes" if task["number"] < len(model.right) else "no")

    assert select(Model("a"), Model("b", right=range(5)), workflow_func=plain).metrics["accuracy_avg"] == 0.5


def test_weights_are_loaded_and_their_tokens_counted(select, pocket_folder):
    async def ask(task, model):
        completion = await model.client.chat.completions.create(  # not through model(...)
            model=model.model_name, messages=[{"role": "user", "content": str(task["number"])}]
        )
        return WorkflowOutput(response=completion.choices[0].message.content)

    def candidate(max_tokens):
        return TunerModelConfig(model_path=pocket_folder, max_model_len=128, max_tokens=max_tokens)

    long, short = candidate(8), candidate(1)
    given = {"workflow_func": ask, "judge": avg_token_consumption_judge, "max_threads": 5, "chat_model": "openai"}
    selection = select(long, short, **given)
    assert selection.model is short and selection.metrics["output_tokens_avg"] == 1.0
    assert selection.candidates[1].label == f"{pocket_folder} #2"
    again = select(long, short, **given)
    names = [name for name in selection.metrics if "time" not in name]
    assert [selection.metrics[name] for name in names] == [again.metrics[name] for name in names]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"candidate_models": [Model("a")]}, ConfigError, "At least two candidate models must be provided"),
        ({"candidate_models": [Model("a"), 3]}, ConfigError, r"candidate_models\[1\] must be a chat model"),
        ({"candidate_models": [Model("a"), "./none"]}, ModelError, "./none"),
        ({"max_threads": 0}, ConfigError, "max_threads must be greater than or equal to 1, got 0"),
        ({"train_dataset": [{"number": 1}]}, ConfigError, "train_dataset must be a DatasetConfig, got list"),
        ({"train_dataset": DatasetConfig(path="./none.jsonl")}, DataError, "none.jsonl"),
        ({"judge_func": workflow}, ValueError, r"Missing essential parameters: \['response'\]"),
        ({"workflow_func": judge}, ValueError, r"Missing essential parameters: \['model'\]"),
        (
            {"candidate_models": [Model("a"), TunerModelConfig(model_path="m", max_model_len=9, api_key_env="KEY")]},
            ConfigError,
            "m: api_key_env has no effect without base_url",
        ),
        (
            {
                "candidate_models": [
                    Model("a"),
                    TunerModelConfig(model_path="m", max_model_len=9, tensor_parallel_size=2),
                ]
            },
            ConfigError,
            "m: tensor_parallel_size=2 is not supported",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_any_run(dataset, given, error, message):
    models = [Model("a"), Model("b")]
    arguments = {"workflow_func": workflow, "judge_func": judge, "train_dataset": dataset, "candidate_models": models}
    with pytest.raises(error, match=message):
        asyncio.run(tunesmith.select_model(**arguments | given))
    assert models[0].num_calls == 0
