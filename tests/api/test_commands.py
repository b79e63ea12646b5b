"""The functions beside `tune`: each takes a config object or its file, and returns a small result."""

from __future__ import annotations

import asyncio
import json

import pytest
import yaml
from peft import PeftModel
from user_functions import ask, judge

from tunesmith import (
    EvalConfig,
    ExportSection,
    PipelineConfig,
    PreferenceConfig,
    PrepareSection,
    SftConfig,
    evaluate,
    export,
    measure_pass_rates,
    prefer,
    prepare,
    run_pipeline,
    sft,
)
from tunesmith.config import (
    ConversationDataSection,
    DatasetSection,
    EngineSection,
    ExportStage,
    LoraSection,
    ModelSection,
    MonitorSection,
    RolloutSection,
    ServedModelSection,
    SftStage,
    SftTrainerSection,
    SourceSection,
)
from tunesmith.errors import ConfigError, DataError, ModelError

QUIET = MonitorSection(trackers=(), has_progress=False)


@pytest.fixture
def conversations(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}"}]}
        for n in range(8)
    ]
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ConversationDataSection(path=str(path))


@pytest.fixture
def sft_config(conversations, pocket_folder):
    return SftConfig(
        model=ModelSection(path=pocket_folder, max_model_len=128, device="cpu", lora=LoraSection(r=4)),
        train_dataset=conversations,
        max_rows_per_batch=4,
        trainer=SftTrainerSection(learning_rate=1e-3),
        monitor=QUIET,
    )


def test_fine_tuning_returns_its_history_and_its_adapter(sft_config, tmp_path):
    result = sft(sft_config, out=tmp_path / "sft")
    assert result.history.steps == (1, 2)
    assert result.metrics["train/loss"] == result.history["train/loss"][-1]
    assert sum(result.history["train/loss"]) / 2 == pytest.approx(result.loss)
    assert "2 on 8 rows" in repr(result)
    assert isinstance(result.model()[0], PeftModel)
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(sft_config.model_dump(mode="json", exclude_unset=True)))
    assert sft(path, out=tmp_path / "file", overrides=["max_steps=1"]).num_steps == 1


def test_preference_training_takes_its_config(tmp_path, pocket_folder):
    pairs = [{"prompt": f"{n} apples?", "chosen": f"I see {n}.", "rejected": f"No {n}."} for n in range(4)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = PreferenceConfig(
        model=ModelSection(path=pocket_folder, max_model_len=128, device="cpu"),
        train_dataset=ConversationDataSection(path=str(path)),
        monitor=QUIET,
    )
    result = prefer(config, out=tmp_path / "dpo")
    assert result.history["preference/accuracy"] == [result.metrics["preference/accuracy"]]
    with pytest.raises(ConfigError, match="config must be of type SftConfig or the path of a YAML file, got Pref"):
        sft(config, out=tmp_path / "no")


def test_an_evaluation_shows_its_tables_and_no_rollouts(config, pocket_folder, tmp_path):
    async def in_a_notebook():
        models = {"a": pocket_folder, "b": pocket_folder}
        return evaluate(config, workflow_func=ask, judge_func=judge, models=models, out=tmp_path / "eval")

    result = asyncio.run(in_a_notebook())
    assert result.metrics["test/a/reward"] == result.sets["test"].results["a"].estimates["reward"].mean
    assert repr(result) == (tmp_path / "eval" / "comparison.md").read_text()
    assert "<th>a</th><th>b</th>" in result._repr_html_()
    assert "Tom has" not in repr(result) + result._repr_html_()
    frame = result.to_pandas().set_index(["set", "model", "quantity"])
    assert frame.loc[("test", "b", "reward"), "mean"] == result.metrics["test/b/reward"]


def test_an_evaluation_config_needs_no_named_workflow(tasks, pocket_folder):
    config = EvalConfig(
        models={"base": pocket_folder},
        eval_datasets={"test": DatasetSection(path=tasks)},
        model=ServedModelSection(max_model_len=128, max_tokens=4, device="cpu"),
        engine=EngineSection(kv_cache_tokens=8192),
        rollout=RolloutSection(chat_model="openai"),
        has_progress=False,
    )
    result = evaluate(config, workflow_func=ask, judge_func=judge, overrides=["evaluation.max_tasks=2"])
    assert (result.folder, len(result.sets["test"].results["base"].tasks)) == (None, 2)
    with pytest.raises(ConfigError, match="workflow is missing"):
        evaluate(config)
    with pytest.raises(ConfigError, match="config must be of type EvalConfig or the path of a YAML file, got dict"):
        evaluate(config.model_dump(), workflow_func=ask)


def test_pass_rates_are_measured_with_functions(config, tmp_path):
    out = tmp_path / "measured.jsonl"
    result = measure_pass_rates(
        config, field="rate", out=out, num_runs=2, workflow_func=ask, judge_func=judge, overrides=["judge=null"]
    )
    assert result.num_rows == len(out.read_text().splitlines()) == 6
    assert "rows  6, 0 dropped" in repr(result)


def test_preparation_takes_its_config(tmp_path):
    solution = "We add what Tom has and buys: <<{n}+7={total}>>{total} apples.\n#### {total}"
    rows = [
        {"question": f"Tom has {n} apples and buys 7. How many?", "answer": solution.format(n=n, total=n + 7)}
        for n in range(10, 14)
    ]
    source = tmp_path / "questions.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = prepare(PrepareSection(data=SourceSection(path=str(source))), out=tmp_path / "out")
    assert result.num_train == len(result.train_path.read_text().splitlines()) == 4
    assert "4 rows of 4; dropped: none" in repr(result)


def test_an_export_is_verified_and_loads(pocket_folder, tmp_path):
    result = export(pocket_folder, out=tmp_path / "out", formats=("hf",), name="pocket-2")
    assert result.model_path == str(tmp_path / "out" / "hf")
    assert result.metrics["hf/num_tokens"] > 0
    assert "num_tokens" in repr(result) and "pocket-2" in repr(result)
    model, tokenizer = result.model()
    assert model.config.vocab_size == len(tokenizer)
    section = ExportSection(path=pocket_folder, license="mit", has_verification=False)
    again = export(section, out=tmp_path / "mit", overrides=["name=third"])
    assert "not verified" in repr(again)
    assert "license: mit" in (tmp_path / "mit" / "hf" / "README.md").read_text()
    with pytest.raises(ConfigError, match="formats"):
        export(pocket_folder, out=tmp_path / "bad", formats=("onnx",))


def test_a_pipeline_of_typed_stages_returns_each_stage(sft_config, tmp_path):
    stages = {
        "sft": SftStage(**{name: getattr(sft_config, name) for name in sft_config.model_fields_set}),
        "export": ExportStage(path="stage:sft", formats=("adapter",)),
    }
    config = PipelineConfig(folder=str(tmp_path / "pipeline"), stages=stages)
    result = run_pipeline(config, only="sft")
    assert [stage.state for stage in result.stages.values()] == ["done", "new"]
    assert result.stages["sft"].history.steps == (1, 2)
    assert result.stages["sft"].metrics["steps"] == 2
    assert isinstance(result.model()[0], PeftModel)
    with pytest.raises(ModelError, match="no model"):
        _ = result.stages["export"].model_path
    again = run_pipeline(config)
    assert again.report.is_file() and "export  done" in repr(again)


def test_models_without_labels_and_a_missing_config_are_named(config):
    with pytest.raises(ConfigError, match="models must map labels to paths, as .*got 'models/base'"):
        evaluate(config, workflow_func=ask, judge_func=judge, models="models/base")
    with pytest.raises(ConfigError, match="config must be of type EvalConfig or the path of a YAML file, got NoneType"):
        evaluate(None)


def test_an_error_in_rows_names_the_key_of_the_data_set(sft_config, tmp_path):
    (tmp_path / "header.csv").write_text("messages\n")
    (tmp_path / "data.jsonl").write_text('{"question": "?"}\n')
    for knob, name, message in (
        ("train_dataset", "data.jsonl", "row 0 has neither messages nor text; its fields are question"),
        ("eval_dataset", "header.csv", r"the data set '.*' \(split 'train'\) has no rows"),
    ):
        changed = sft_config.model_copy(update={knob: ConversationDataSection(path=str(tmp_path / name))})
        with pytest.raises(DataError, match=f"^{knob}: {message}$"):
            sft(changed, out=tmp_path / "sft")
