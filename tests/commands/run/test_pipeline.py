"""`tunesmith run`: order of stages; skipped, resumed and repeated stages; validation before the first stage."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from run_folders import load_untimed_metrics
from tunesmith.cli import app
from tunesmith.commands.run.config import PipelineConfig, load_pipeline, plan_stages
from tunesmith.commands.run.folder import PipelineFolder, is_same_stage
from tunesmith.errors import ConfigError
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.runs.load_config import build_section
from tunesmith.runs.workspace import Workspace

MAKER = """
import json
from pathlib import Path

from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.commands.prepare.calculator_agent import calculator_agent

def make(out_dir, num_rows):
    if Path("fail").exists():
        raise ValueError("make failed")
    for split, first in (("train", 10), ("test", 50)):
        rows = [
            {"question": f"Tom has {n} apples and buys 7. How many in the end?",
             "answer": f"We add what Tom has and buys: <<{n}+7={n + 7}>>{n + 7} apples.\\n#### {n + 7}"}
            for n in range(first, first + num_rows)
        ]
        (out_dir / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (out_dir / "model").mkdir()
    tokenizer = build_pocket_tokenizer()
    save_model_files(out_dir / "model", build_pocket_model(tokenizer, hidden_size=96, num_layers=1), tokenizer)
    return {"rows": 2 * num_rows, "about": "apples"}

async def agent(task, model):
    with Path("called").open("a") as file:
        file.write("x")
    if Path("stop").exists() and len(Path("called").read_text()) > 6:
        raise KeyboardInterrupt
    return await calculator_agent(task, model)

def fill(out_dir):
    if (out_dir / "half").exists():
        raise ValueError("the folder is not new")
    (out_dir / "half").write_text("")
    if Path("fail").exists():
        raise ValueError("not now")
"""
COUNTER = """
import numpy as np
import torch

def count(out_dir):
    return {"accuracy": np.float32(0.5), "tasks": np.int64(3), "by_split": {"test": [np.int32(2)]},
            "loss": torch.tensor(0.25)}

def name_file(out_dir):
    return {"file": out_dir}

def list_scores(out_dir):
    return {"scores": np.zeros(2)}
"""
LOADED = {"max_model_len": 512, "device": "cpu"}
SERVED = LOADED | {"max_tokens": 4}
AGENT = {
    "workflow": "tunesmith.commands.prepare.calculator_agent:calculator_agent",
    "judge": "tunesmith.judges.composite:gsm8k_judge",
    "engine": {"kv_cache_tokens": 8192},
    "rollout": {"chat_model": "openai"},
}
QUIET = {"trackers": [], "has_progress": False}
STAGES = {
    "make": {"kind": "function", "function": "maker.py:make", "args": {"num_rows": "${variables.num_rows}"}},
    "prepare": {"data": {"path": "stage:make/train.jsonl"}, "eval_data": {"path": "stage:make/test.jsonl"}},
    "sft": {
        "model": {"path": "stage:make/model", **LOADED},
        "train_dataset": {"path": "stage:prepare/train.jsonl"},
        "trainer": {"learning_rate": 1e-3},
        "max_tokens_per_batch": 1024,
        "monitor": QUIET,
    },
    "rl": {
        "model": {"path": "stage:sft", **SERVED},
        "train_dataset": {"path": "stage:prepare/train.jsonl"},
        "algorithm": {"batch_size": 2, "group_size": 2},
        "total_steps": 1,
        "monitor": QUIET,
        **AGENT,
    },
    "eval": {
        "models": {"base": "stage:make/model", "sft": "stage:sft", "rl": "stage:rl"},
        "model": SERVED,
        "eval_datasets": {"test": {"path": "stage:prepare/eval.jsonl"}},
        "evaluation": {"max_tasks": 2},
        "has_progress": False,
        **AGENT,
    },
    "export": {"path": "stage:rl"},
}


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maker.py").write_text(MAKER)
    write(tmp_path, STAGES)
    return tmp_path


def write(workdir, stages, **more):
    config = {"folder": "out", "variables": {"num_rows": 3}, "stages": stages} | more
    (workdir / "pipeline.yaml").write_text(json.dumps(config))


def run(*arguments, expected_status=0):
    result = CliRunner().invoke(app, ["run", "pipeline.yaml", *arguments])
    assert result.exit_code == expected_status, result.output
    return result.output


def read_messages(output):
    """Messages printed for each stage, by its name: started, done, skipped ..."""
    lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith("stage ")]
    messages: dict[str, list[str]] = {}
    for line in lines:
        name, _, message = line.partition(" ")[2].partition(": ")
        messages.setdefault(name, []).append(message.partition(" in ")[0])
    return messages


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """A folder with a completed pipeline, and the output of the command."""
    workdir = tmp_path_factory.mktemp("completed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workdir)
        (workdir / "maker.py").write_text(MAKER)
        write(workdir, STAGES)
        output = run()
    return workdir, output


@pytest.fixture
def copied(completed, tmp_path, monkeypatch):
    """A copy of the completed pipeline, with its absolute paths replaced."""
    original, _ = completed
    for name in ("maker.py", "pipeline.yaml"):
        shutil.copy(original / name, tmp_path / name)
    shutil.copytree(original / "out", tmp_path / "out")
    for path in (tmp_path / "out").rglob("*.json"):
        path.write_text(path.read_text().replace(str(original), str(tmp_path)))
    for path in (tmp_path / "out").rglob("config.yaml"):
        path.write_text(path.read_text().replace(str(original), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_stages_run_in_order_and_write_their_outputs(completed):
    workdir, output = completed
    assert list(read_messages(output)) == list(STAGES)
    assert all(messages == ["started", "done"] for messages in read_messages(output).values())
    out = workdir / "out"
    AutoModelForCausalLM.from_pretrained(out / "export" / "hf")
    assert (out / "prepare" / "eval.jsonl").read_text().count("\n") == 3
    assert [record["step"] for record in load_metrics(out / "rl" / "metrics.jsonl")] == [1]
    assert list(json.loads((out / "eval/comparison.json").read_text())["test"]["models"]) == ["base", "sft", "rl"]


def test_the_report_has_time_tokens_device_and_figures_of_each_stage(completed):
    workdir, output = completed
    text = (workdir / "out/report.md").read_text()
    assert text in output
    report = {each["name"]: each for each in json.loads((workdir / "out/report.json").read_text())["stages"]}
    assert list(report) == list(STAGES)
    assert all(each["state"] == "done" and each["done"]["seconds"] > 0 for each in report.values())
    done = {name: each["done"] for name, each in report.items()}
    assert done["make"]["figures"] == {"rows": 6, "about": "apples"}
    assert {name: done[name]["device"] for name in ("sft", "rl", "eval")} == dict.fromkeys(
        ("sft", "rl", "eval"), "cpu, 1 thread"
    )
    (step,) = [row for row in load_metrics(workdir / "out/rl/metrics.jsonl") if row["kind"] == "train"]
    assert done["rl"]["tokens"] == step["rollout/num_sampled_tokens"]
    assert done["rl"]["figures"]["mean reward of the last tenth of the steps"] == step["rollout/reward_mean"]
    steps = [row for row in load_metrics(workdir / "out/sft/metrics.jsonl") if row["kind"] == "train"]
    assert done["sft"]["tokens"] == sum(row["train/num_trained_tokens"] for row in steps)
    comparison = json.loads((workdir / "out/eval/comparison.json").read_text())
    assert done["eval"]["tokens"] == sum(model["num_sampled_tokens"] for model in comparison["test"]["models"].values())
    assert "### test: 2 tasks, 1 rollout of each" in text
    assert "| mean (95 % interval) | base " in text


def test_completed_stages_are_skipped(copied):
    before = (copied / "out/rl/metrics.jsonl").read_bytes()
    assert all(messages == ["already done, skipped"] for messages in read_messages(run()).values())
    assert (copied / "out/rl/metrics.jsonl").read_bytes() == before


def test_a_changed_stage_and_all_that_depend_on_it_run_again(copied):
    messages = read_messages(run("--set", "stages.rl.trainer.learning_rate=0.002"))
    assert {name: each[0] for name, each in messages.items()} == {
        "make": "already done, skipped",
        "prepare": "already done, skipped",
        "sft": "already done, skipped",
        "rl": "restarted; its previous output is",
        "eval": "restarted; its previous output is",
        "export": "restarted; its previous output is",
    }
    (aside,) = (copied / "out").glob("rl.old-*")
    assert (aside / "metrics.jsonl").exists()


def test_settings_without_effect_on_results_rerun_no_stage(copied):
    messages = read_messages(run("--set", "stages.rl.monitor.log_interval_steps=7"))
    assert all(each == ["already done, skipped"] for each in messages.values())


def test_a_longer_training_run_resumes_from_its_last_commit(copied):
    messages = read_messages(run("--set", "stages.rl.total_steps=2"))
    assert messages["rl"] == ["resumed", "done"]
    assert messages["eval"][0].startswith("restarted")
    steps = [row for row in load_metrics(copied / "out/rl/metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in steps] == [1, 2]


def test_a_killed_training_stage_resumes_from_its_last_commit_with_equal_metrics(copied):
    arguments = [
        "--set", "stages.rl.workflow=maker.py:agent", "--set", "stages.rl.total_steps=2",
        "--set", "stages.rl.save_interval_steps=1", "--only", "rl",
    ]  # fmt: skip
    run(*arguments)
    expected = load_untimed_metrics(copied / "out/rl/metrics.jsonl")
    assert [row["step"] for row in expected] == [1, 2]
    (copied / "called").unlink()
    (copied / "stop").write_text("")
    run(*arguments, "--again", expected_status=130)
    assert (copied / "out/rl/global_step_1").exists()
    assert not (copied / "out/rl/global_step_2").exists()
    (copied / "stop").unlink()
    (copied / "called").unlink()
    assert read_messages(run(*arguments)) == {"rl": ["resumed", "done"]}
    assert len((copied / "called").read_text()) == 4, "one step of two tasks with two rollouts each"
    assert load_untimed_metrics(copied / "out/rl/metrics.jsonl") == expected
    done = PipelineFolder(copied / "out").load_done("rl")
    assert (done.num_attempts, done.num_killed) == (2, 0)


def test_one_stage_can_run_alone_and_again(copied):
    assert read_messages(run("--only", "eval")) == {"eval": ["already done, skipped"]}
    messages = read_messages(run("--only", "eval", "--again"))
    assert messages == {"eval": ["restarted; its previous output is", "done"]}
    messages = read_messages(run("--from", "eval"))
    assert messages == {"eval": ["already done, skipped"], "export": ["already done, skipped"]}
    remade = read_messages(run("--only", "sft", "--again"))
    assert list(remade) == ["sft"]
    assert run("--check").splitlines() == [
        "make: done, will be skipped",
        "prepare: done, will be skipped",
        "sft: done, will be skipped",
        "rl: will run again",
        "eval: will run again",
        "export: will run again",
    ]


def test_check_writes_nothing_and_prints_what_would_run(workdir):
    assert run("--check").splitlines() == [f"{name}: will run" for name in STAGES]
    assert not (workdir / "out").exists()


def test_a_failed_or_killed_stage_is_resumed_in_its_folder(workdir):
    write(workdir, {"fill": {"kind": "function", "function": "maker.py:fill"}})
    (workdir / "fail").write_text("")
    assert "not now" in run(expected_status=1)
    assert run("--check").strip() == "fill: unfinished, will be resumed"
    (workdir / "fail").unlink()
    folder, left = PipelineFolder(workdir / "out"), ("report.md.tmp-1", "stages/fill/DONE.json.tmp-1")
    folder.begin(*plan_stages(load_pipeline("pipeline.yaml")))  # the record that a killed attempt leaves
    for name in left:
        (folder.root / name).write_text("")
    assert read_messages(run()) == {"fill": ["resumed", "done"]}
    assert not any((folder.root / name).exists() for name in left)
    done = folder.load_done("fill")
    assert (done.num_attempts, done.num_killed) == (3, 1)
    assert "in 3 attempts; the time of 1 killed is not included" in (workdir / "out/report.md").read_text()


def test_figures_of_a_function_may_be_numbers_of_numpy_and_torch(workdir):
    (workdir / "counter.py").write_text(COUNTER)
    write(workdir, {"count": {"kind": "function", "function": "counter.py:count"}})
    run()
    figures = PipelineFolder(workdir / "out").load_done("count").figures
    assert figures == {"accuracy": 0.5, "tasks": 3, "by_split": {"test": [2]}, "loss": 0.25}
    assert "- accuracy: 0.5\n- tasks: 3\n" in (workdir / "out/report.md").read_text()


def test_a_figure_that_is_not_json_is_named(workdir):
    (workdir / "counter.py").write_text(COUNTER)
    write(workdir, {"count": {"kind": "function", "function": "counter.py:name_file"}})
    assert "function='counter.py:name_file' returned file=PosixPath(" in run(expected_status=1)
    write(workdir, {"count": {"kind": "function", "function": "counter.py:list_scores"}})
    assert "function='counter.py:list_scores' returned scores=array([0., 0.])" in run(expected_status=1)


def test_a_run_resumes_only_if_the_changed_settings_may_change(copied):
    folder = PipelineFolder(copied / "out")
    start = folder.load_start("rl")

    def plan(*overrides):
        return next(each for each in plan_stages(load_pipeline("pipeline.yaml", overrides)) if each.name == "rl")

    assert is_same_stage(start, plan())
    assert is_same_stage(start, plan("stages.rl.total_steps=5", "stages.rl.save_interval_steps=1"))
    assert not is_same_stage(start, plan("stages.rl.total_steps=5", "stages.rl.seed=1"))
    assert not is_same_stage(
        folder.load_start("eval"), plan_stages(load_pipeline("pipeline.yaml", ["stages.eval.seed=1"]))[4]
    )


def test_two_commands_cannot_write_one_pipeline(workdir):
    with Workspace(workdir / "out"):
        assert "is locked by process" in run(expected_status=1)


def test_a_missing_input_stage_is_named(workdir):
    assert "stage 'sft' needs 'make', which is not done" in run("--only", "sft", expected_status=1)
    assert "there is no stage 'stf'" in run("--only", "stf", expected_status=1)
    assert "--only and --from are both set" in run("--only", "sft", "--from", "sft", expected_status=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["stages.rl.model.path=stage:stf"],
            "stages.rl: stage:stf: 'stf' is not a stage; earlier stages: make, prepare, sft",
        ),
        (["stages.sft.model.path=stage:rl"], "stages.sft: stage:rl: 'rl' is not an earlier stage"),
        (["stages.rl.model.path=stage:prepare"], "a stage of kind prepare has no model; name a file"),
        (["stages.export.path=stage:make/../../x"], "is outside of the stage's folder"),
        (
            ["stages.rl.algorithm.group_sze=3"],
            "stages.rl.algorithm.group_sze is not a known key: did you mean 'group_size'?",
        ),
        (["stages.rl.algorithm.group_size=many"], "stages.rl.algorithm.group_size must be a valid integer"),
        (["stages.rl.name=mine"], "stages.rl: name cannot be set"),
        (
            ["stages.more.path=x"],
            "stages.more has no kind; kind must be one of rl, sft, prefer, prepare",
        ),
        (["stages.more.kind=train"], "stages.more has the kind 'train'"),
        (["stages.eval.judge=tunesmith.judges.composite:gsm8k_jugde"], "stages.eval: judge="),
        (["stages.make.function=maker.py:mak"], "stages.make: function="),
        (["stages.rl.eval_datasets.x.path=none.jsonl"], "stages.rl: "),
        (["stages.sft.model.path=/no/model"], "stages.sft: "),
        (["stages.prepare.data.path=/no/data"], "stages.prepare: "),
        (["folder=null"], "folder must be a valid string"),
    ],
)
def test_errors_are_reported_before_any_stage_runs(workdir, overrides, message):
    output = run(*(part for each in overrides for part in ("--set", each)), expected_status=1)
    assert message in output
    assert not (workdir / "out").exists()


def test_missing_packages_are_reported_before_any_stage_runs(workdir, monkeypatch):
    find = importlib.util.find_spec
    missing = ("wandb", "matplotlib", "llama_cpp")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find("json" if name == "gguf" else name)
    )
    gguf = ["--set", "stages.export.formats=[gguf]"]
    verified = run(*gguf, "--set", "stages.export.has_verification=true", expected_status=1)
    assert "stages.export: has_verification=true compares GGUF files in llama.cpp" in verified
    quantized = run(*gguf, "--set", "stages.export.gguf_types=[q4_k_m]", expected_status=1)
    assert "stages.export: the type q4_k_m needs llama.cpp's quantizer" in quantized
    assert "stages.rl: monitor.trackers: wandb" in run("--set", "stages.rl.monitor.trackers=[wandb]", expected_status=1)
    assert "stages.eval: a plot needs matplotlib" in run("--set", "stages.eval.has_plot=true", expected_status=1)


def test_a_reference_to_a_missing_file_is_named(copied):
    output = run("--set", "stages.export.path=stage:make/modell", expected_status=1)
    assert "stages.export: stage 'make' wrote no 'modell'" in output


def test_a_stage_whose_input_turns_out_to_be_missing_has_not_begun(workdir):
    stages = {
        "fill": {"kind": "function", "function": "maker.py:fill"},
        "make": {"kind": "function", "function": "maker.py:make", "args": {"num_rows": "stage:fill/none"}},
    }
    write(workdir, stages)
    assert "stages.make: stage 'fill' wrote no 'none'" in run(expected_status=1)
    assert PipelineFolder(workdir / "out").load_start("make") is None


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("stage", "damage", "message"),
    [
        ("make", lambda out: (out / "make/test.jsonl").unlink(), "stages.prepare: stage 'make' wrote no 'test.jsonl'"),
        ("make", lambda out: shutil.rmtree(out / "make/model"), "stages.sft: stage 'make' wrote no 'model'"),
        ("make", lambda out: shutil.rmtree(out / "make"), "make is missing"),
        ("prepare", lambda out: truncate(out / "prepare/train.jsonl"), "train.jsonl is damaged: it has"),
        ("prepare", lambda out: shutil.rmtree(out / "prepare"), "prepare is not a complete"),
        ("sft", lambda out: shutil.rmtree(out / "sft"), "model is not a complete"),
        ("sft", lambda out: truncate(out / "sft/model/model.safetensors"), "model.safetensors is damaged: it has"),
        ("rl", lambda out: (out / "rl/global_step_1/config.json").unlink(), "config.json is damaged: it has 0 bytes"),
        ("eval", lambda out: (out / "eval/comparison.json").unlink(), "comparison.json: No such file"),
        ("eval", lambda out: truncate(out / "eval/comparison.json"), "comparison.json: it is not JSON"),
        ("export", lambda out: truncate(out / "export/hf/model.safetensors"), "model.safetensors is damaged: it has"),
    ],
)
def test_damaged_outputs_are_reported_before_any_stage_runs(copied, stage, damage, message):
    damage(copied / "out")
    for arguments in (["--check"], ["--check", "--from", stage], []):
        output = run(*arguments, expected_status=1)
        assert message in output and f"stage '{stage}' " in output
        assert f"--only {stage} --again" in output
    assert run("--check", "--only", stage, "--again").strip() == f"{stage}: will run again"


def test_damaged_outputs_matter_only_to_stages_that_need_them(copied):
    shutil.rmtree(copied / "out/sft/model")
    assert run("--check", "--from", "export").strip() == "export: done, will be skipped"
    assert run("--check", "--only", "rl").strip() == "rl: done, will be skipped"
    output = run("--check", "--only", "rl", "--again", expected_status=1)
    assert "stage 'sft' is done, but its output is incomplete" in output


@pytest.mark.parametrize("name", ["START.json", "DONE.json"])
def test_a_damaged_stage_record_is_named(copied, name):
    record = copied / "out/stages/sft" / name
    record.write_text('{"mark": "x"}')
    assert f"{record} is damaged or of another version" in run("--check", expected_status=1)


@pytest.mark.parametrize("name", ["stages", "../x"])
def test_stage_names_must_be_folder_names(name):
    stages = {name: {"kind": "function", "function": "a:b"}}
    with pytest.raises(ConfigError, match="is not a valid stage name"):
        build_section(PipelineConfig, {"folder": "out", "stages": stages})
