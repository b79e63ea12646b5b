"""Pass rates of a model are written as a field of the training set; a killed measurement resumes."""

from __future__ import annotations

import json
import os

import pytest

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.commands.pass_rate import measure_pass_rates
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError, DataError, StorageError
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.runs.load_config import change_section, load_section
from tunesmith.runs.workspace import Workspace


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
    config = load_section(RunConfig,
        None,
        [
            f"model.path={pocket_folder}", "model.max_model_len=64", "model.max_tokens=3", "model.device=cpu",
            "engine.kv_cache_tokens=4096", f"train_dataset.path={tmp_path / 'train.jsonl'}", "algorithm.batch_size=2",
            "rollout.max_failure_rate=1",
        ],
    )  # fmt: skip

    def call(field="rate", out="out.jsonl", workflow=ask, num_runs=2, max_tasks=None, overrides=()):
        return measure_pass_rates(
            change_section(config, overrides), workflow=workflow, judge=judge, build_model=ChatModel,
            field=field, num_runs=num_runs, out=tmp_path / out, max_tasks=max_tasks,
        )  # fmt: skip

    return call


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_get_clipped_pass_rates_and_rows_without_a_score_are_omitted(measure):
    result = measure()
    assert [row["rate"] for row in read(result.path)] == [0.0, 1.0, 1.0, 0.0]
    assert read(result.path)[1]["question"] == "1 apples"
    assert (result.num_rows, result.num_unscored) == (4, 1)
    assert sorted(p.suffix for p in result.path.parent.glob("out*")) == [".jsonl"]


def test_a_killed_measurement_resumes_after_the_last_complete_batch(measure, tmp_path):
    measured = []

    async def recording_ask(task, model):
        measured.append(task["number"])
        return await ask(task, model)

    (tmp_path / "out.jsonl.part").write_text("[[0, 0.5], [1, 0.25]]\n[[2, 0.")
    result = measure(workflow=recording_ask)
    assert sorted(set(measured)) == [2, 3, 4]
    assert [row["rate"] for row in read(result.path)] == [0.5, 0.25, 1.0, 0.0]


def test_the_error_of_the_data_set_names_its_key(measure, tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataError, match=r"^train_dataset: the data set '.*train\.jsonl' has no rows$"):
        measure()


def test_a_killed_measurement_is_not_continued_with_other_settings_or_tasks(measure, tmp_path):
    async def stop(task, model):
        if task["number"] == 2:
            raise KeyboardInterrupt
        return await ask(task, model)

    with pytest.raises(KeyboardInterrupt):
        measure(workflow=stop)
    assert len(read(tmp_path / "out.jsonl.part")) == 1
    with pytest.raises(ConfigError, match=r"part was made with other settings: num_runs was 2, is 3\. Restore them"):
        measure(num_runs=3)
    with pytest.raises(ConfigError, match=r"part was made with other settings: algorithm\.batch_size was 2, is 3\. "):
        measure(overrides=["algorithm.batch_size=3"])
    with pytest.raises(ConfigError, match="has 2 measured tasks, more than max_tasks=1"):
        measure(max_tasks=1)
    train = tmp_path / "train.jsonl"
    text = train.read_text()
    train.write_text(text.replace("0 apples", "9 apples"))
    with pytest.raises(ConfigError, match="other settings: the content of train_dataset changed"):
        measure()
    train.write_text(text)
    assert [row["rate"] for row in read(measure(max_tasks=3).path)] == [0.0, 1.0, 1.0]
    assert [path.name for path in tmp_path.glob("out*")] == ["out.jsonl"]


def test_two_measurements_cannot_write_one_file(measure, tmp_path):
    with (
        Workspace(tmp_path / "out.jsonl", is_whole=True),
        pytest.raises(StorageError, match=f"out.jsonl is locked by process {os.getpid()}"),
    ):
        measure()
    assert measure().num_rows == 4


def test_existing_fields_and_files_are_not_overwritten(measure, tmp_path):
    with pytest.raises(DataError, match="already have a field 'number'"):
        measure(field="number")
    (tmp_path / "out.jsonl").write_text("")
    with pytest.raises(ConfigError, match="already exists"):
        measure()
