"""Preferences: the trained tokens of a row and their sign, training runs, and resuming to the same weights."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tunesmith.commands.run.config import PipelineConfig
from tunesmith.commands.run.run import run_stage
from tunesmith.commands.sft.conversations import PreferenceReader, add_probes
from tunesmith.commands.sft.train import run_offline
from tunesmith.config import PreferenceConfig
from tunesmith.errors import ConfigError, DataError
from tunesmith.model.load import load_tokenizer
from tunesmith.runs.load_config import build_section

ASK = [{"role": "user", "content": "What is 6 * 7?"}]
TALK = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello, what can I do?"},
    {"role": "user", "content": "What is 6 * 7?"},
]
PAIR = {"prompt": "What is 6 * 7?", "chosen": "It is 42.", "rejected": "It is 13."}


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


def read(tokenizer, *rows, kind="pairs", **options):
    return PreferenceReader(tokenizer, kind=kind).read(rows, **{"max_model_len": 256} | options)


def describe(tokenizer, samples):
    """Trained text, advantage and group of each sample."""
    return [
        (
            tokenizer.decode([i for i, m in zip(sample.token_ids, sample.is_sampled, strict=True) if m]),
            {a for a, m in zip(sample.advantages, sample.is_sampled, strict=True) if m},
            (sample.group_index, sample.trajectory_index),
        )
        for sample in samples
    ]


def say(content):
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"messages": ASK, "chosen": "It is 42.", "rejected": "It is 13."},
        {"prompt": ASK, "chosen": say("It is 42."), "rejected": [say("It is 13.")]},
        {"chosen": [*ASK, say("It is 42.")], "rejected": [*ASK, say("It is 13.")]},
        {"prompt": "What is 6 * 7?", "chosen": [*ASK, say("It is 42.")], "rejected": [*ASK, say("It is 13.")]},
        {"prompt": TALK, "chosen": "It is 42.", "rejected": "It is 13."},
        {"chosen": [*TALK, say("It is 42.")], "rejected": [*TALK, say("It is 13.")]},
    ],
)
def test_only_the_completions_of_a_pair_are_trained(tokenizer, row):
    samples = read(tokenizer, row)
    assert describe(tokenizer, samples) == [
        ("It is 42.<|im_end|>", {1.0}, (0, 0)),
        ("It is 13.<|im_end|>", {-1.0}, (0, 1)),
    ]
    prompt = TALK if row.get("prompt") == TALK or len(row["chosen"]) == 4 else ASK
    expected = tokenizer.apply_chat_template([*prompt, say("It is 42.")], tokenize=False)
    assert tokenizer.decode(list(samples[0].token_ids)) == expected.removesuffix("\n")


def test_all_assistant_messages_of_a_completion_are_trained(tokenizer):
    chosen = [say("Let me see."), {"role": "user", "content": "Well?"}, say("It is 42.")]
    samples = read(tokenizer, {"prompt": "What is 6 * 7?", "chosen": chosen, "rejected": "No."})
    assert describe(tokenizer, samples)[0][0] == "Let me see.<|im_end|>It is 42.<|im_end|>"


def test_labels_set_the_sign_of_the_advantage(tokenizer):
    rows = [
        {"prompt": "What is 6 * 7?", "completion": "It is 42.", "label": True},
        {"messages": TALK, "completion": [say("It is 13.")], "label": 0},
    ]
    assert describe(tokenizer, read(tokenizer, *rows, kind="labels")) == [
        ("It is 42.<|im_end|>", {1.0}, (0, 0)),
        ("It is 13.<|im_end|>", {-1.0}, (1, 1)),
    ]


def test_probes_are_the_next_rows_completion_after_each_prompt(tokenizer):
    rows = [{"prompt": f"{n} apples?", "completion": f"I see {n}.", "label": n % 2 == 0} for n in range(3)]
    samples = read(tokenizer, *rows, kind="labels")
    probes = add_probes(samples, max_model_len=256)[3:]
    assert describe(tokenizer, probes) == [
        ("I see 1.<|im_end|>", {0.0}, (0, 3)),
        ("I see 2.<|im_end|>", {0.0}, (1, 4)),
        ("I see 0.<|im_end|>", {0.0}, (2, 5)),
    ]
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "0 apples?"}, say("I see 1.")], tokenize=False
    )
    assert tokenizer.decode(list(probes[0].token_ids)) == expected.removesuffix("\n")
    assert add_probes(samples[:1], max_model_len=256) == samples[:1]
    assert add_probes(samples, max_model_len=4) == samples
    assert add_probes([], max_model_len=4) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "row 1 has no prompt"),
        ({"prompt": "a", "chosen": "b"}, "row 1 has no rejected"),
        ({"prompt": "a", "messages": ASK, "chosen": "b", "rejected": "c"}, "both prompt and messages: keep one"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "row 1.chosen must be text, a message or a list"),
        ({"prompt": [], "chosen": "b", "rejected": "c"}, "row 1.prompt must be text"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "row 1: messages.1. is an empty assistant message"),
        ({"chosen": [*ASK, say("a")], "rejected": [*TALK, say("b")]}, "must share a prefix"),
        ({"chosen": [*ASK, say("a")], "rejected": ASK}, "must share a prefix"),
        ({"prompt": "x", "chosen": [*ASK, say("a")], "rejected": [*ASK, say("b")]}, "does not continue the prompt"),
        ({"prompt": "a", "chosen": "b " * 300, "rejected": "c"}, r"row 1 has \d+ tokens, more than"),
    ],
)
def test_invalid_pairs_are_refused(tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        read(tokenizer, PAIR, row)


@pytest.mark.parametrize("label", [None, "yes", 2, 0.5, []])
def test_a_label_must_be_true_or_false(tokenizer, label):
    with pytest.raises(DataError, match=r"row 0\.label must be true or false"):
        read(tokenizer, {"prompt": "a", "completion": "b", "label": label}, kind="labels")
    with pytest.raises(DataError, match="row 0 has no completion"):
        read(tokenizer, PAIR, kind="labels")


def test_a_pair_that_is_too_long_is_dropped_whole(tokenizer):
    rows = [PAIR, {"prompt": "a", "chosen": "b", "rejected": "c " * 300}, PAIR]
    samples = read(tokenizer, *rows, drops_long_rows=True)
    assert [(sample.group_index, sample.trajectory_index) for sample in samples] == [(0, 0), (0, 1), (1, 2), (1, 3)]


PAIRS = [{"prompt": f"{n} apples?", "chosen": f"I see {n}.", "rejected": f"No {n}."} for n in range(8)]
LABELED_ROWS = [
    {"prompt": f"{n} apples?", "completion": f"I see {n}." if n % 2 else f"No {n}.", "label": n % 2 == 1}
    for n in range(8)
]
ROWS = {"dpo": PAIRS, "kto": LABELED_ROWS, "orpo": PAIRS, "simpo": PAIRS}


@pytest.fixture
def run(folder, tmp_path):
    def call(name, out, *, rows=None, model=None, **settings):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS[name]))
        defaults = {
            "model": {"path": str(folder), "max_model_len": 256, "device": "cpu"} | (model or {}),
            "train_dataset": {"path": str(data)},
            "algorithm_type": name,
            "trainer": {"learning_rate": 1e-3},
            "monitor": {"trackers": [], "has_progress": False},
            "max_rows_per_batch": 4,
        }
        return run_offline(build_section(PreferenceConfig, defaults | settings), out_dir=tmp_path / out)

    return call


def read_metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def test_dpo_loss_starts_at_log_two_and_falls(run, tmp_path):
    result = run("dpo", "out", num_epochs=6)
    metrics = read_metrics(tmp_path / "out")
    assert metrics[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics[0]["preference/margin"] == pytest.approx(0, abs=1e-5)
    assert metrics[-1]["preference/accuracy"] == 1
    assert (metrics[-1]["train/loss"] + metrics[-2]["train/loss"]) / 2 == pytest.approx(result.loss)
    assert result.loss < 0.5
    assert metrics[-1]["preference/chosen_reward"] > 0 > metrics[-1]["preference/rejected_reward"]
    assert (result.num_rows, result.num_steps) == (8, 12)
    AutoModelForCausalLM.from_pretrained(result.folder)


def test_kto_loss_starts_at_one_half_and_falls(run, tmp_path):
    result = run("kto", "out", num_epochs=12)
    metrics = read_metrics(tmp_path / "out")
    assert metrics[0]["train/loss"] == pytest.approx(0.5, abs=1e-6)
    assert metrics[0]["preference/num_desirable"] + metrics[0]["preference/num_undesirable"] == 4
    assert metrics[-1]["preference/desirable_reward"] > metrics[-1]["preference/undesirable_reward"] + 0.5
    assert result.loss < 0.45


@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_losses_without_a_reference_separate_the_pairs_and_load_one_model(run, tmp_path, name, monkeypatch):
    from_pretrained, loaded = AutoModelForCausalLM.from_pretrained, []

    def count(path, *args, **kwargs):
        loaded.append(path)
        return from_pretrained(path, *args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", count)
    run(name, "out", num_epochs=12)
    metrics = read_metrics(tmp_path / "out")
    assert len(loaded) == 1
    assert metrics[-1]["preference/accuracy"] == 1
    assert metrics[-1]["preference/margin"] > max(metrics[0]["preference/margin"], 0.5)
    if name == "orpo":
        assert metrics[-1]["preference/sft_loss"] < metrics[0]["preference/sft_loss"] - 0.5
    run("dpo", "with-reference")
    assert len(loaded) == 3


@pytest.mark.parametrize(
    ("loss_type", "first_loss"), [("ipo", 25.0), ("hinge", 1.0), ("robust", math.log(2))]
)  # at a gap of 0
def test_forms_of_dpo_start_at_their_loss_of_the_starting_model(run, tmp_path, loss_type, first_loss):
    args = {"loss_type": loss_type} | ({"label_smoothing": 0.1} if loss_type == "robust" else {})
    run("dpo", "out", num_epochs=4, terms_args=args)
    metrics = read_metrics(tmp_path / "out")
    assert metrics[0]["train/loss"] == pytest.approx(first_loss, rel=1e-4)
    assert metrics[-1]["preference/accuracy"] == 1
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo"])
def test_a_stopped_run_resumes_to_the_same_weights(run, tmp_path, name, monkeypatch):
    settings = {"num_epochs": 3, "eval_fraction": 0.25, "evaluation_interval_steps": 2, "save_interval_steps": 2}
    whole = run(name, "whole", **settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tunesmith.trainer.trainer.Trainer.step", stop_after(3))
        run(name, "cut", **settings)
    resumed = run(name, "cut", **settings)
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    one, other = (load_file(each.folder / "model.safetensors") for each in (whole, resumed))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole.eval_loss is not None and whole.num_eval_rows == 2


def stop_after(num_steps):
    from tunesmith.trainer.trainer import Trainer

    step, taken = Trainer.step, []

    def count(self, *args, **kwargs):
        if len(taken) == num_steps:
            raise KeyboardInterrupt
        taken.append(1)
        return step(self, *args, **kwargs)

    return count


def test_an_adapter_is_trained_on_preferences(run, tmp_path):
    result = run("dpo", "out", num_epochs=4, model={"lora": {"r": 4}})
    metrics = read_metrics(tmp_path / "out")
    assert metrics[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert result.loss < math.log(2) - 0.01
    assert (result.folder / "adapter_config.json").exists()


def test_the_command_takes_a_file(folder, tmp_path):
    from typer.testing import CliRunner

    from tunesmith.cli import app

    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    (tmp_path / "dpo.yaml").write_text(
        f"model: {{path: {folder}, max_model_len: 256, device: cpu}}\n"
        f"train_dataset: {{path: {tmp_path / 'pairs.jsonl'}}}\nmonitor: {{trackers: [], has_progress: false}}\n"
    )
    done = CliRunner().invoke(app, ["prefer", str(tmp_path / "dpo.yaml"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert re.search(r"steps +1 on 8 rows\n +loss +0.6931", done.output)
    wrong = CliRunner().invoke(
        app, ["prefer", str(tmp_path / "dpo.yaml"), "--out", str(tmp_path / "o"), "--set", "algoritm_type=kto"]
    )
    assert wrong.exit_code == 1
    assert "did you mean 'algorithm_type'" in wrong.output


def test_a_pipeline_has_a_stage_for_preferences(folder, tmp_path):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    stage = {
        "kind": "prefer",
        "model": {"path": str(folder), "max_model_len": 256, "device": "cpu"},
        "train_dataset": {"path": str(tmp_path / "pairs.jsonl")},
        "monitor": {"trackers": [], "has_progress": False},
    }
    pipeline = build_section(PipelineConfig, {"folder": str(tmp_path / "all"), "stages": {"dpo": stage}})
    assert isinstance(pipeline.stages["dpo"], PreferenceConfig)
    settings = build_section(PreferenceConfig, {key: value for key, value in stage.items() if key != "kind"})
    outcome = run_stage("prefer", settings, out_dir=tmp_path / "all" / "dpo", choose_model=lambda config: None)
    assert outcome.figures["rows"] == 8
    assert (outcome.model / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dpo", {"terms_args": {"betta": 0.2}}, "unknown argument 'betta'.*did you mean 'beta'"),
        ("dpo", {"terms_args": {"beta": 0.0}}, "beta=0.0"),
        ("dpo", {"terms_args": {"desirable_weight": 1.0}}, "unknown argument 'desirable_weight'"),
        ("dpo", {"terms_args": {"loss_type": "robust"}}, "loss_type='robust' .* set label_smoothing"),
        ("simpo", {"terms_args": {"label_smoothing": 0.1}}, "unknown argument 'label_smoothing'"),
        ("orpo", {"model": {"lora": {"dropout": 0.1}}}, "dropout.*logprobs of different forward passes"),
        ("kto", {"max_rows_per_batch": 1}, "max_rows_per_batch=1: kto pairs"),
        ("dpo", {"trainer": {"num_minibatches": 2}}, "num_minibatches=2 has no effect"),
    ],
)
def test_invalid_settings_are_refused(run, tmp_path, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        run(name, "out", **settings)
    assert not (tmp_path / "out").exists()


def test_kto_needs_rows_to_pair(run, tmp_path):
    with pytest.raises(DataError, match="kto pairs prompts with completions of other rows and needs at least 2 rows"):
        run("kto", "out", rows=LABELED_ROWS[:1])
    assert not (tmp_path / "out").exists()
