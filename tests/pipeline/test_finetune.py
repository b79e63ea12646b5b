"""Fine-tuning: the tokens that train are the replies, the loss falls, and the folder loads."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunesmith.config import ModelSection, MonitorSection, TrainerSection
from tunesmith.errors import DataError, ModelError, StorageError
from tunesmith.model.load import load_tokenizer
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.pipeline.demonstrations import DemonstrationReader
from tunesmith.pipeline.finetune import FinetuneSettings, build_batches, run_finetuning

TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "6 * 7"}'}}
ROW = {
    "messages": [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "The answer is 42."},
    ],
    "tools": [TOOL],
}
SETTINGS = FinetuneSettings(num_epochs=2, max_tokens_per_batch=160, seed=0)
QUIET = MonitorSection(trackers=(), has_progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    tokenizer = build_pocket_tokenizer()
    tokenizer.save_pretrained(place)
    build_pocket_model(tokenizer, hidden_size=96, num_layers=1).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


def test_only_replies_and_their_ends_train(tokenizer):
    (sample,) = DemonstrationReader(tokenizer).read([ROW], max_model_len=256)
    trained = [i for i, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True) if is_sampled]
    assert tokenizer.decode(trained) == (
        '<tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call><|im_end|>'
        "The answer is 42.<|im_end|>"
    )
    whole = tokenizer.apply_chat_template(ROW["messages"], tools=[TOOL], tokenize=False)
    assert tokenizer.decode(list(sample.token_ids)) == whole.removesuffix("\n")


def test_rows_that_cannot_be_learned(tokenizer):
    reader = DemonstrationReader(tokenizer)
    with pytest.raises(DataError, match="row 1 has no assistant message"):
        reader.read([ROW, {"messages": ROW["messages"][:2]}], max_model_len=256)
    with pytest.raises(DataError, match="row 0: messages must be a non-empty list"):
        reader.read([{"text": "hello"}], max_model_len=256)
    with pytest.raises(DataError, match=r"row 0 has \d+ tokens, more than model.max_model_len=16"):
        reader.read([ROW], max_model_len=16)


def test_batches_hold_every_sample_once_an_epoch(tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "x"}]} for n in range(9)
    ]
    samples = DemonstrationReader(tokenizer).read(rows, max_model_len=256)
    settings = FinetuneSettings(num_epochs=2, max_tokens_per_batch=3 * len(samples[0].token_ids), seed=1)
    batches = build_batches(samples, settings)
    assert [len(batch) for batch in batches] == [3] * 6
    for half in (batches[:3], batches[3:]):
        assert sorted(sample.token_ids for batch in half for sample in batch) == sorted(s.token_ids for s in samples)
    assert batches[0] != batches[3]


def test_loss_falls_and_the_folder_loads(folder, tmp_path):
    result = run_finetuning(
        [ROW] * 4,
        out_dir=tmp_path / "sft",
        model=ModelSection(path=str(folder), max_model_len=256, device="cpu"),
        trainer=TrainerSection(learning_rate=1e-2),
        settings=FinetuneSettings(num_epochs=6, max_tokens_per_batch=160),
        monitor=QUIET,
    )
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    assert result.loss < 0.5 * math.log(len(tokenizer))
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]
    assert (result.folder / "metrics.jsonl").read_text().count("\n") == result.num_steps
    tuned, base = AutoModelForCausalLM.from_pretrained(result.folder), AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(tuned.lm_head.weight, base.lm_head.weight)


def test_the_same_seed_makes_the_same_weights(folder, tmp_path):
    weights = []
    for name in ("one", "two"):
        result = run_finetuning(
            [ROW] * 4,
            out_dir=tmp_path / name,
            model=ModelSection(path=str(folder), max_model_len=256, device="cpu"),
            trainer=TrainerSection(learning_rate=1e-2),
            settings=SETTINGS,
            monitor=QUIET,
        )
        weights.append(AutoModelForCausalLM.from_pretrained(result.folder).lm_head.weight)
    assert torch.equal(*weights)


def test_bad_input_is_found_before_work(folder, tmp_path):
    arguments = {
        "rows": [ROW],
        "out_dir": tmp_path / "sft",
        "model": ModelSection(path=str(folder), max_model_len=256),
        "trainer": TrainerSection(),
        "settings": SETTINGS,
        "monitor": QUIET,
    }
    with pytest.raises(StorageError, match="is there already"):
        run_finetuning(**arguments | {"out_dir": tmp_path})
    with pytest.raises(ModelError, match="longer than the model"):
        run_finetuning(**arguments | {"model": ModelSection(path=str(folder), max_model_len=10**6)})
    with pytest.raises(DataError, match="no rows"):
        run_finetuning(**arguments | {"rows": []})
    assert list(tmp_path.iterdir()) == []
