"""Pass rates of a model become a field of the training set; a measurement that was cut short goes on."""

from __future__ import annotations

import json

import pytest

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.api import build_openai_chat_model
from tunesmith.errors import ConfigError, DataError
from tunesmith.pipeline.eval.pass_rates import measure_pass_rates
from tunesmith.pipeline.session.load_config import load_config


async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    if task["number"] == 4:
        raise RuntimeError("broken")
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge(task, response):
    return JudgeOutput(reward=[0.0, 1.0, 3.0, -2.0][task["number"]])


@pytest.fixture
def measure(tmp_path, pocket_folder):
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"question": f"{n} apples", "number": n}) + "\n" for n in range(5))
    )
    config = load_config(
        None,
        [
            f"model.path={pocket_folder}", "model.max_model_len=64", "model.max_tokens=3", "model.device=cpu",
            "engine.kv_cache_tokens=4096", f"train_dataset.path={tmp_path / 'train.jsonl'}", "algorithm.batch_size=2",
            "rollout.max_failure_rate=1",
        ],
    )  # fmt: skip

    def call(field="rate", out="out.jsonl", workflow=ask):
        return measure_pass_rates(
            config, workflow=workflow, judge=judge, build_model=build_openai_chat_model,
            field=field, num_runs=2, out=tmp_path / out,
        )  # fmt: skip

    return call


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_get_their_clipped_pass_rate_and_failures_are_left_out(measure):
    result = measure()
    assert [row["rate"] for row in read(result.path)] == [0.0, 1.0, 1.0, 0.0]
    assert read(result.path)[1]["question"] == "1 apples"
    assert (result.num_rows, result.num_unscored) == (4, 1)
    assert sorted(p.suffix for p in result.path.parent.glob("out*")) == [".jsonl"]


def test_a_measurement_that_was_cut_short_goes_on_after_the_last_whole_batch(measure, tmp_path):
    tried = []

    async def watch(task, model):
        tried.append(task["number"])
        return await ask(task, model)

    (tmp_path / "out.jsonl.part").write_text("[[0, 0.5], [1, 0.25]]\n[[2, 0.")
    result = measure(workflow=watch)
    assert sorted(set(tried)) == [2, 3, 4]
    assert [row["rate"] for row in read(result.path)] == [0.5, 0.25, 1.0, 0.0]


def test_what_is_there_already_is_not_written_over(measure, tmp_path):
    with pytest.raises(DataError, match="a field 'number' already"):
        measure(field="number")
    (tmp_path / "out.jsonl").write_text("")
    with pytest.raises(ConfigError, match="is there already"):
        measure()
    (tmp_path / "other.jsonl.part").write_text("[[0, 0.5]]\n[[1, 0.5]]\n")
    with pytest.raises(ConfigError, match="another algorithm.batch_size"):
        measure(out="other.jsonl")
