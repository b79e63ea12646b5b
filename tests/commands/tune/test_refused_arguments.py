"""Arguments and settings of `tune()` that are refused: one sentence, before a model is loaded."""

from __future__ import annotations

import json
import socket

import pytest

from small_runs import build_small_run, list_apples, write_splits
from tunesmith import AlgorithmConfig, DatasetConfig, TunerModelConfig
from tunesmith.errors import ConfigError, DataError, ModelError, StorageError


@pytest.fixture
def run(tmp_path, pocket_folder):
    """Calls tune() with small settings; arguments and overrides may be given."""
    data = write_splits(tmp_path / "data", list_apples(6))
    return build_small_run(tmp_path, pocket_folder, data, steps=1, max_tokens=6)


def refuse_before_loading(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr("tunesmith.commands.tune.tune.load_actors", fail)


def sync_judge(task, response):
    return None


async def greedy_arguments(task, model, **rest):
    return None


@pytest.mark.parametrize(
    ("arguments", "overrides", "error", "message"),
    [
        ({"judge_func": sync_judge}, (), ValueError, "must be async"),
        ({"workflow_func": greedy_arguments}, (), ValueError, r"\*\*kwargs parameter is not allowed"),
        ({"train_dataset": None}, (), ConfigError, "train_dataset is missing"),
        ({"train_dataset": DatasetConfig(path="/no/such/folder")}, (), DataError, "/no/such/folder"),
        ({}, ("train_dataset.split=validation",), DataError, "validation"),
        ({}, ("train_dataset.required_fields=[solution]",), DataError, "solution"),
        ({"model": TunerModelConfig(model_path="/no/model", max_model_len=64)}, (), ModelError, "/no/model"),
        ({}, ("model.max_model_len=999999",), ModelError, "max_model_len"),
        ({"algorithm": AlgorithmConfig(algorithm_type="grop")}, (), ConfigError, "grpo"),
        ({}, ("algorithm.loss_args.clip_rnge_low=0.1",), ConfigError, "clip_range_low"),
        ({}, ("algoritm.group_size=2",), ConfigError, "algorithm"),
        ({"monitor_type": "nothing"}, (), ConfigError, "trackers"),
        ({}, ("model.device=cuda:77",), ModelError, "cuda:77"),
        ({}, ("model.device=cpu", "trainer.has_row_graphs=true"), ConfigError, "has_row_graphs needs a GPU"),
        ({}, ("trainer.has_row_graphs=true", "trainer.has_compiled_layers=false"), ConfigError, "has_compiled_layers"),
    ],
)
def test_invalid_input_is_one_sentence_before_a_model_loads(run, monkeypatch, arguments, overrides, error, message):
    refuse_before_loading(monkeypatch)
    with pytest.raises(error, match=message):
        run(*overrides, **arguments)


def test_an_unwritable_folder_is_refused_before_a_model_loads(run, monkeypatch, tmp_path):
    refuse_before_loading(monkeypatch)
    (tmp_path / "blocked").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="blocked"):
        run(f"checkpoint_root_dir={tmp_path / 'blocked' / 'runs'}")


def test_a_tokenizer_without_chat_template_is_refused(run, monkeypatch, tmp_path, pocket_folder):
    import shutil

    refuse_before_loading(monkeypatch)
    bare = tmp_path / "bare"
    shutil.copytree(pocket_folder, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model\.chat_template"):
        run(model=TunerModelConfig(model_path=str(bare), max_model_len=64))


def test_a_port_in_use_is_named(run):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"rollout\.http_port"):
        run(f"rollout.http_port={taken.getsockname()[1]}")
