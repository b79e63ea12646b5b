"""Trinity-RFT's example files: summaries of their keys and values, read as files of the command that runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tunesmith.commands.settings import load_file, load_run_file
from tunesmith.compat.trinity_yaml import translate_trinity_file
from tunesmith.config import PreferenceConfig, RunConfig, SftConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.load_function import load_functions
from tunesmith.runs.process import describe_expected

SUMMARIES = [json.loads(line) for line in (Path(__file__).parent / "trinity_examples.jsonl").read_text().splitlines()]
REFUSED = {
    "bench/external_model.yaml": ["model.external_model"],
    "dpo_human_in_the_loop/dpo.yaml": [
        "data_processor.task_pipeline.operators[0].name='human_preference_annotation_mapper'",
        "prefer",
    ],
    "entropy/clipb.yaml": ["algorithm.algorithm_type='grpo_verl'", "algorithm.advantage_fn='clipb'"],
    "entropy/clipv.yaml": ["algorithm.algorithm_type='grpo_verl'", "algorithm.advantage_fn='clipv'"],
    "grpo_gsm8k_experience_pipeline/dj_scoring_exp.yaml": ["project_name"],
}
"""What has no counterpart: annotation by people, clip_b and clip_v, a remote model; and a file of Data-Juicer."""
KINDS = {"sft_mot/sft.yaml": SftConfig, "dpo_humanlike/dpo.yaml": PreferenceConfig}
FUNCTIONS = ["workflow=agent.py:workflow", "judge=agent.py:judge"]


def nest(keys):
    values = {}
    for key, value in keys.items():
        *parents, last = key.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return values


def find(name):
    return nest(next(each["keys"] for each in SUMMARIES if each["file"] == name))


def write(folder, name):
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(find(name), sort_keys=False))
    return file


def test_most_examples_are_accepted():
    assert (len(SUMMARIES), len(SUMMARIES) - len(REFUSED)) == (55, 50)


@pytest.mark.parametrize("name", [each["file"] for each in SUMMARIES])
def test_an_example_is_read_or_all_that_is_missing_is_named(tmp_path, name):
    file = write(tmp_path, name)
    kind, overrides = KINDS.get(name, RunConfig), [] if name in KINDS else FUNCTIONS
    if name not in REFUSED:
        load_file(kind, file, overrides)
        return
    with pytest.raises(ConfigError) as refused:
        load_file(kind, file, overrides)
    for key in REFUSED[name]:
        assert key in str(refused.value)


def test_all_problems_of_a_file_are_one_answer_with_lines(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "mode: serve\nalgorithm:\n  algorithm_type: grpoo\n"
        "model:\n  model_path: m\n  temprature: 1\n  repetition_penalty: 1.2\n"
        "buffer:\n  explorer_input:\n    taskset:\n      path: ${oc.env:NO_SUCH_VARIABLE}\n      storage_type: sql\n"
        "explorer:\n  concurent_mode: x\n"
    )
    with pytest.raises(ConfigError) as refused:
        load_run_file(file)
    lines = str(refused.value).split("\n")
    assert describe_expected(refused.value).split("\n") == lines
    assert lines[0].startswith("7 keys cannot be translated (--set KEY=VALUE answers each")
    found = [
        (line.split(":")[0].removeprefix("- "), line.split(": ")[1].split("=")[0].split(" ")[0]) for line in lines[1:]
    ]
    assert found == [
        ("line 11", "buffer.explorer_input.taskset.path"),
        ("line 1", "mode"),
        ("line 3", "algorithm.algorithm_type"),
        ("line 6", "model.temprature"),
        ("line 7", "model.repetition_penalty"),
        ("line 12", "buffer.explorer_input.taskset.storage_type"),
        ("line 14", "explorer.concurent_mode"),
    ]
    answers = [
        "buffer.explorer_input.taskset.path=my_data", "mode=both", "algorithm.algorithm_type=grpo",
        "model.temprature=null", "model.repetition_penalty=1", "buffer.explorer_input.taskset.storage_type=file",
        "explorer.concurent_mode=null",
        "trainer.learning_rate=1e-5", "buffer.batch_size=5", "explorer.max_retry_times=null", "algorithm.group_size=3",
    ]  # fmt: skip
    config = load_run_file(file, answers)
    assert (config.train_dataset.path, config.trainer.learning_rate) == ("my_data", 1e-5)
    assert (config.algorithm.batch_size, config.algorithm.group_size) == (5, 3)


def test_an_override_of_an_item_of_a_list_answers_its_refusal(tmp_path):
    file = write(tmp_path, "grpo_gsm8k_experience_pipeline/gsm8k.yaml")
    config = load_run_file(file, [*FUNCTIONS, "data_processor.experience_pipeline.operators[0]=null"])
    assert [each.name for each in config.experience.operators] == ["reward_shaping_mapper"]


def test_workflows_and_rewards_are_built_in_or_named():
    boxed = translate_trinity_file(find("asymre_math/math.yaml"))
    names = ("math_boxed_workflow", "math_boxed_reward")
    assert [boxed.values[kind] for kind in ("workflow", "judge")] == [
        f"tunesmith.compat.trinity_rewards:{name}" for name in names
    ]
    assert boxed.values["train_dataset"]["fields"]["format"]["prompt_key"]
    own = translate_trinity_file(find("grpo_alfworld/alfworld.yaml"))
    assert "workflow" not in own.values
    assert any("'alfworld_workflow' is not built in (built in are math_workflow" in note for note in own.notes)


def test_an_unknown_reward_function_names_those_that_exist(tmp_path):
    config = load_run_file(write(tmp_path, "grpo_math/math.yaml"))
    with pytest.raises(ConfigError, match="'rm_gallery_reward' is not built in; built in are .*math_boxed_reward"):
        load_functions(config, workflow=lambda task, model: None)


def test_arguments_of_workflows_reach_the_task():
    section = translate_trinity_file(find("grpo_frozen_lake/frozen_lake.yaml")).values["train_dataset"]
    assert section["fields"]["workflow_args"] == {"env_max_steps": 8, "agent_max_steps": 10, "is_slippery": False}
    assert set(section["fields"]) == {"workflow_args"}, "the row stays as it is for workflows of one's own"


def test_operators_of_data_juicer_that_have_a_counterpart_are_mapped():
    operators = [
        {"name": "text_length_filter", "args": {"min_len": 5, "max_len": 100}},
        {"name": "document_deduplicator"},
    ]
    values = {
        "buffer": {"explorer_input": {"taskset": {"path": "d"}}},
        "data_processor": {"task_pipeline": {"operators": operators, "target_fields": ["question"]}},
    }
    assert translate_trinity_file(values).values["train_dataset"]["operators"] == [
        {"name": "length_filter", "args": {"field": "question", "min_chars": 5, "max_chars": 100}},
        {"name": "deduplicate", "args": {"fields": ["question"]}},
    ]
    operators[1]["args"] = {"lowercase": True}
    translated = translate_trinity_file(values)
    assert translated.values["train_dataset"]["operators"][1] == {
        "name": "data_juicer",
        "args": {"process": [{"document_deduplicator": {"lowercase": True}}], "field": "question"},
    }
    assert any("document_deduplicator' runs in Data-Juicer's own package (pip install" in n for n in translated.notes)


def test_other_operators_of_data_juicer_run_in_its_package():
    tasks = translate_trinity_file(find("grpo_gsm8k_task_pipeline/gsm8k.yaml"))
    [operator] = tasks.values["train_dataset"]["operators"]
    assert (operator["name"], operator["args"]["num_proc"]) == ("data_juicer", 32)
    assert list(operator["args"]["process"][0]) == ["llm_difficulty_score_filter"]
    assert tasks.values["train_dataset"]["path"] == "the taskset_path", "the input, not the pipeline's output"
    assert any("without it: `tunesmith pass-rate`" in note for note in tasks.notes)
    rollouts = translate_trinity_file(find("grpo_gsm8k_experience_pipeline/gsm8k.yaml"))
    first, second = rollouts.values["experience"]["operators"]
    assert (first["name"], first["args"]["prompt_key"], second["name"]) == (
        "data_juicer",
        "question",
        "reward_shaping_mapper",
    )


def test_what_a_run_without_it_trains_on_too_is_a_note():
    values = {
        "algorithm": {"algorithm_type": "multi_step_grpo", "advantage_fn_args": {"step_norm": True}},
        "buffer": {"explorer_input": {"taskset": {"path": "d"}}},
        "explorer": {"over_rollout": {"ratio": 0.2}, "dynamic_timeout": {"enable": True, "ratio": 4}},
    }
    notes = " ".join(translate_trinity_file(values).notes)
    assert "over_rollout.ratio=0.2 has no effect: a step waits for all its tasks" in notes
    assert "dynamic_timeout.enable=True has no effect" in notes
    assert "step_norm=True has no effect: Trinity-RFT ignores it too" in notes


def test_operators_before_the_task_set_in_a_file_are_kept():
    values = {
        "data_processor": {
            "task_pipeline": {"operators": [{"name": "document_deduplicator"}], "target_fields": ["question"]}
        },
        "buffer": {"explorer_input": {"taskset": {"path": "d"}}},
    }
    section = translate_trinity_file(values).values["train_dataset"]
    assert (section["path"], [each["name"] for each in section["operators"]]) == ("d", ["deduplicate"])


def test_parts_of_algorithms_and_models_without_names_are_resolved():
    email = translate_trinity_file(find("grpo_email_search/email_search.yaml"))
    assert email.values["algorithm"]["algorithm_type"] == "rec"
    assert email.values["algorithm"]["advantage"].endswith("group:compute_multi_step_grpo_advantages")
    assert list(email.values["auxiliary_models"]) == ["auxiliary_0"]
    distilled = translate_trinity_file(find("opd_gsm8k/opd_gsm8k.yaml")).values
    assert "teacher" in distilled["algorithm"] and "auxiliary_models" not in distilled
    adapter = translate_trinity_file(find("tinker/tinker.yaml")).values["model"]["lora"]
    assert adapter == {"r": 16, "target_modules": "all-linear"}
    critic = translate_trinity_file(find("ppo_countdown/countdown.yaml")).values["algorithm"]["critic"]
    assert critic["learning_rate"] == 1e-5


def test_offline_training_is_a_file_of_its_command(tmp_path):
    pairs = load_file(PreferenceConfig, write(tmp_path, "dpo_humanlike/dpo.yaml"))
    assert (pairs.algorithm_type, pairs.num_epochs, pairs.max_steps, pairs.max_rows_per_batch) == ("dpo", 2, 200, 64)
    assert (pairs.trainer.learning_rate, pairs.trainer.schedule, pairs.model.max_model_len) == (5e-7, "cosine", 1536)
    conversations = load_file(SftConfig, write(tmp_path, "sft_mot/sft.yaml"))
    assert (conversations.train_dataset.name, conversations.trainer.learning_rate) == ("math", 1e-5)
    with pytest.raises(ConfigError, match="is a file for `tunesmith sft`"):
        load_run_file(tmp_path / "run.yaml")
