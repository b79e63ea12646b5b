"""Supervised fine-tuning: the loss falls, the best weights are kept, and folders of other runs are refused."""

from __future__ import annotations

import copy
import json
import math
import shutil
from statistics import fmean

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PhimoeConfig

from conversation_examples import CALL, ROW
from fakes import full_disk
from tunesmith.commands.sft import train
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.commands.sft.plan import build_batches
from tunesmith.commands.sft.train import OfflineTraining, run_offline, run_stage
from tunesmith.config import (
    ConversationDataSection,
    LoraSection,
    ModelSection,
    PatienceSection,
    SftConfig,
    SftTrainerSection,
)
from tunesmith.errors import ConfigError, DataError, ModelError, StorageError, TrainingError
from tunesmith.model.adapters.adapter import find_dropouts
from tunesmith.model.load import check_model, load_section_model
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.runs.load_config import build_section, dump_config, load_section
from tunesmith.runs.record import RunRecord
from tunesmith.storage import check_complete, find_checkpoints
from tunesmith.trainer.trainer import Trainer

QUIET = {"trackers": (), "has_progress": False}


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", [build_row(number) for number in range(12)])


def build_row(number):
    call = copy.deepcopy(CALL)
    call["function"]["arguments"] = json.dumps({"expression": f"{number} * 7"})
    row = copy.deepcopy(ROW)
    row["messages"][1]["content"] = f"What is {number} * 7?"
    row["messages"][2]["tool_calls"] = [call]
    row["messages"][3]["content"] = str(7 * number)
    row["messages"][4]["content"] = f"The answer is {7 * number}."
    return row


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_config(folder, data, *, lora=None, max_model_len=256, **settings):
    values = {
        "model": ModelSection(path=str(folder), max_model_len=max_model_len, device="cpu", lora=lora),
        "train_dataset": ConversationDataSection(path=str(data)),
        "num_epochs": 2,
        "max_tokens_per_batch": 240,
        "trainer": SftTrainerSection(learning_rate=1e-2),
        "monitor": QUIET,
    }
    return build_section(SftConfig, values | settings)


def read_metrics(root):
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def test_a_model_that_would_be_computed_wrongly_is_refused_before_training(data, tmp_path):
    """There is no engine that would refuse it; the layers of this one have a window in their mask only."""
    place, tokenizer = tmp_path / "model", build_pocket_tokenizer()
    tokenizer.save_pretrained(place)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 1, "num_local_experts": 2, "sliding_window": 8}
    config = PhimoeConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    with pytest.raises(ModelError, match="sliding-window layer 0 passes no window size"):
        run_offline(build_config(place, data), out_dir=tmp_path / "run")


def test_batches_hold_every_row_once_an_epoch():
    rows = [
        {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "x"}]} for n in range(9)
    ]
    samples = ConversationReader(build_pocket_tokenizer()).read(rows, max_model_len=256)
    length = len(samples[0].token_ids)

    def order(epoch=0, **settings):
        config = build_config("m", "d", max_tokens_per_batch=3 * length, **settings)
        return [[sample.group_index for sample in batch] for batch in build_batches(samples, config, epoch=epoch)]

    assert [len(batch) for batch in order()] == [3, 3, 3]
    assert sorted(index for batch in order() for index in batch) == list(range(9))
    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=1)
    assert order(has_shuffling=False) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert order(has_shuffling=False, max_rows_per_batch=2) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_loss_falls_and_the_folder_loads(folder, data, tmp_path):
    result = run_offline(build_config(folder, data, num_epochs=6), out_dir=tmp_path / "sft")
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    assert result.loss < 0.5 * math.log(len(tokenizer))
    names = {"config.yaml", "sources.json", "metrics.jsonl", "model", "run.lock"}
    assert {path.name for path in (tmp_path / "sft").iterdir()} == names
    rows = read_metrics(tmp_path / "sft")
    assert len(rows) == result.num_steps == result.best_step
    assert result.loss == pytest.approx(fmean(row["train/loss"] for row in rows if row["train/epoch"] > 5))
    assert rows[-1]["train/epoch"] == 6
    assert (result.num_rows, result.num_dropped_rows, result.eval_loss) == (12, 0, None)
    tuned, base = AutoModelForCausalLM.from_pretrained(result.folder), AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(tuned.lm_head.weight, base.lm_head.weight)


def test_the_learning_rate_warms_up_and_follows_a_cosine(folder, data, tmp_path):
    config = build_config(folder, data, trainer={"learning_rate": 1e-2, "warmup_ratio": 0.4})
    run_offline(config, out_dir=tmp_path / "sft")
    rates = [row["train/learning_rate"] for row in read_metrics(tmp_path / "sft")]
    num_warm = math.ceil(0.4 * len(rates))
    expected = [1e-2 * (step + 1) / (num_warm + 1) for step in range(num_warm)]
    rest = len(rates) - num_warm
    expected += [1e-2 * (1 + math.cos(math.pi * step / rest)) / 2 for step in range(rest)]
    assert rates == pytest.approx(expected)


def test_max_steps_ends_training_and_the_schedule_within_an_epoch(folder, data, tmp_path):
    trainer = {"learning_rate": 1e-2, "warmup_ratio": 0.2}
    whole = run_offline(build_config(folder, data, num_epochs=3, trainer=trainer), out_dir=tmp_path / "whole")
    num_steps = whole.num_steps * 2 // 3 - 1
    result = run_offline(
        build_config(folder, data, num_epochs=9, max_steps=num_steps, trainer=trainer), out_dir=tmp_path / "sft"
    )
    rows = read_metrics(tmp_path / "sft")
    assert len(rows) == result.num_steps == result.best_step == num_steps
    assert rows[-1]["train/epoch"] == pytest.approx(read_metrics(tmp_path / "whole")[num_steps - 1]["train/epoch"])
    assert 1 < rows[-1]["train/epoch"] < 2
    assert result.loss == pytest.approx(fmean(row["train/loss"] for row in rows if row["train/epoch"] > 1))
    num_warm = math.ceil(0.2 * num_steps)
    last = 1e-2 * (1 + math.cos(math.pi * (num_steps - 1 - num_warm) / (num_steps - num_warm))) / 2
    assert rows[-1]["train/learning_rate"] == pytest.approx(last)


def test_rendered_text_written_by_save_to_disk_is_trained_on(folder, tmp_path):
    texts = [f"<|im_start|>user\n{n} + {n}<|im_end|>\n<|im_start|>assistant\n{2 * n}<|im_end|>" for n in range(8)]
    Dataset.from_list([{"text": text, "answer": "x"} for text in texts]).save_to_disk(tmp_path / "sft_train")
    result = run_offline(build_config(folder, tmp_path / "sft_train", num_epochs=8), out_dir=tmp_path / "sft")
    rows = read_metrics(tmp_path / "sft")
    assert rows[-1]["train/loss"] < 0.5 * rows[0]["train/loss"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = sum(len(tokenizer.encode(text, add_special_tokens=False)) - 1 for text in texts)
    assert (result.num_rows, result.num_trained_tokens) == (8, expected)


def test_adapter_dropout_follows_the_knob_and_applies_only_to_training(folder, data, tmp_path):
    plain, dropped = (
        run_offline(build_config(folder, data, lora=LoraSection(r=4, dropout=dropout)), out_dir=tmp_path / str(dropout))
        for dropout in (0.0, 0.3)
    )
    one, other = (load_file(each.folder / "adapter_model.safetensors") for each in (plain, dropped))
    assert any((one[name] != other[name]).any() for name in one)
    assert json.loads((dropped.folder / "adapter_config.json").read_text())["lora_dropout"] == 0.3
    again = load_section_model(ModelSection(path=str(dropped.folder), lora=LoraSection(), device="cpu"))
    assert not any(isinstance(module, torch.nn.Dropout) and module.p for module in again.modules())
    assert again.peft_config["default"].lora_dropout == 0
    more = load_section_model(ModelSection(path=str(plain.folder), lora=LoraSection(dropout=0.1), device="cpu"))
    assert [layer.p for layer in find_dropouts(more)] == [0.1] * 4
    assert not any(layer.training for layer in find_dropouts(more))


def test_training_an_adapter_saves_an_adapter_and_leaves_its_base_unchanged(folder, data, tmp_path):
    result = run_offline(build_config(folder, data, lora=LoraSection(r=4), num_epochs=4), out_dir=tmp_path / "sft")
    rows = read_metrics(tmp_path / "sft")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), result.folder).eval()
    merged = load_section_model(ModelSection(path=str(result.folder), max_model_len=64, device="cpu"))
    ids = torch.arange(9, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    check_model(str(result.folder), max_model_len=64)


def test_the_loss_of_an_adapter_on_four_bits_falls(tmp_path, data):
    pytest.importorskip("bitsandbytes")
    base, tokenizer = tmp_path / "base", build_pocket_tokenizer()
    tokenizer.save_pretrained(base)
    build_pocket_model(tokenizer, hidden_size=192, num_layers=1).save_pretrained(base)
    config = build_config(base, data, lora=LoraSection(quantization="nf4"), num_epochs=3)
    result = run_offline(config, out_dir=tmp_path / "sft")
    rows = read_metrics(tmp_path / "sft")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert (result.folder / "adapter_model.safetensors").is_file()


def test_the_best_evaluation_is_kept(folder, data, tmp_path):
    """The training rows contradict the held-out rows, so the first evaluation is the best one."""
    rows = [{"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "x" * 9}]}]
    held_out = write_rows(tmp_path / "eval.jsonl", rows)
    config = build_config(
        folder,
        data,
        eval_dataset=ConversationDataSection(path=str(held_out)),
        evaluation_interval_steps=2,
        num_epochs=3,
        save_interval_steps=3,
    )
    result = run_offline(config, out_dir=tmp_path / "sft")
    losses = {row["step"]: row["eval/loss"] for row in read_metrics(tmp_path / "sft") if row["kind"] == "eval"}
    assert list(losses) == sorted({*range(2, result.num_steps, 2), result.num_steps})
    assert result.best_step == min(losses, key=losses.get) < result.num_steps
    assert result.eval_loss == losses[result.best_step]
    assert compute_loss_by_hand(result.folder, held_out) == pytest.approx(result.eval_loss, rel=1e-4)


def test_a_full_disk_while_the_best_weights_are_written_is_one_sentence(folder, data, tmp_path, monkeypatch):
    rows = [{"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "x" * 9}]}]
    held_out = ConversationDataSection(path=str(write_rows(tmp_path / "eval.jsonl", rows)))
    config = build_config(folder, data, eval_dataset=held_out, evaluation_interval_steps=1, save_interval_steps=1000)
    whole = run_offline(config, out_dir=tmp_path / "whole")
    assert whole.best_step < whole.num_steps
    finish, root = OfflineTraining.finish, tmp_path / "sft"

    def fill_disk(training, summary):
        with full_disk(200_000):
            finish(training, summary)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match=r"^cannot write .*; \d+ bytes are free"):
        patch.setattr(OfflineTraining, "finish", fill_disk)
        run_offline(config, out_dir=root)
    assert RunRecord(root).error["step"] == whole.num_steps
    result = run_offline(config, out_dir=root)
    assert (root / "model/model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert (result.best_step, result.eval_loss) == (whole.best_step, whole.eval_loss)


def test_a_stage_reports_the_tokens_of_the_steps_that_it_made(folder, data, tmp_path):
    config = build_config(folder, data, num_epochs=3, max_steps=2)
    batches = build_batches_of(config, data)[:2]
    stage = run_stage(config, out_dir=tmp_path / "sft", choose_model=None)
    assert stage.tokens == sum(sum(sample.is_sampled) for batch in batches for sample in batch)


def test_training_ends_when_the_evaluation_loss_no_longer_falls_and_resumes_to_the_same_end(folder, data, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "x" * 9}]}]
    held_out = write_rows(tmp_path / "eval.jsonl", rows)
    config = build_config(
        folder, data, eval_dataset=ConversationDataSection(path=str(held_out)), evaluation_interval_steps=1,
        num_epochs=6, save_interval_steps=1, keep_checkpoints=50, early_stopping=PatienceSection(patience=3),
    )  # fmt: skip
    root = tmp_path / "sft"
    result, before = run_offline(config, out_dir=root), read_metrics(root)
    assert result.num_steps == result.best_step + 3 < len([*range(6)]) * len(build_batches_of(config, data))
    assert f"eval/loss has not improved on {result.eval_loss:.6g} of step {result.best_step} in 3" in result.stop_reason
    assert run_offline(config, out_dir=root) == result
    for num_removed in (0, 2):  # as if killed before `model/` was written, and two steps earlier
        shutil.rmtree(root / "model")
        for checkpoint in find_checkpoints(root)[len(find_checkpoints(root)) - num_removed :]:
            shutil.rmtree(checkpoint)
        assert run_offline(config, out_dir=root) == result
        assert [strip_times(row) for row in read_metrics(root)] == [strip_times(row) for row in before]


def build_batches_of(config, data):
    reader = ConversationReader(AutoTokenizer.from_pretrained(config.model.path))
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    samples = reader.read(rows, max_model_len=config.model.max_model_len, drops_long_rows=False)
    return build_batches(samples, config, epoch=0)


def strip_times(row):
    return {name: value for name, value in row.items() if not name.startswith("perf/")}


def test_early_stopping_without_held_out_rows_is_refused(folder, data):
    with pytest.raises(ValueError, match="early_stopping has no effect without eval_dataset .*held-out rows"):
        build_config(folder, data, early_stopping=PatienceSection())


def compute_loss_by_hand(folder, data):
    """Mean negative log-likelihood of the assistant's tokens, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    reader = ConversationReader(AutoTokenizer.from_pretrained(folder))
    total, count = 0.0, 0
    for sample in reader.read([json.loads(line) for line in data.read_text().splitlines()], max_model_len=256):
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(sample.is_sampled[1:])
        total, count = total - logprobs[mask].sum().item(), count + int(mask.sum())
    return total / count


def test_eval_fraction_holds_out_rows(folder, data, tmp_path):
    result = run_offline(build_config(folder, data, eval_fraction=0.25), out_dir=tmp_path / "sft")
    assert (result.num_rows, result.num_eval_rows) == (9, 3)
    assert result.eval_loss is not None


def test_dropped_long_rows_are_counted(folder, tmp_path):
    rows = [build_row(1), ROW | {"messages": [*ROW["messages"][:4], {"role": "assistant", "content": "42 " * 99}]}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    result = run_offline(build_config(folder, data, max_model_len=128, long_rows="drop"), out_dir=tmp_path / "sft")
    assert (result.num_rows, result.num_dropped_rows) == (1, 1)
    with pytest.raises(DataError, match=r"row 1 has \d+ tokens"):
        run_offline(build_config(folder, data, max_model_len=128), out_dir=tmp_path / "other")
    with pytest.raises(DataError, match="every row of .* is longer than model.max_model_len=16"):
        run_offline(build_config(folder, data, max_model_len=16, long_rows="drop"), out_dir=tmp_path / "other")


def test_equal_seeds_give_equal_weights(folder, data, tmp_path):
    one, two, other = (
        load_file(
            run_offline(build_config(folder, data, seed=seed), out_dir=tmp_path / name).folder / "model.safetensors"
        )
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    )
    name = "model.embed_tokens.weight"
    assert (one[name] == two[name]).all()
    assert (one[name] != other[name]).any()


def test_a_finished_folder_returns_its_result_and_refuses_other_settings(folder, data, tmp_path):
    config = build_config(folder, data)
    result = run_offline(config, out_dir=tmp_path / "sft")
    stamp = (result.folder / "model.safetensors").stat().st_mtime_ns
    assert run_offline(config, out_dir=tmp_path / "sft") == result
    assert run_offline(build_config(folder, data, save_interval_steps=3), out_dir=tmp_path / "sft") == result
    with pytest.raises(ConfigError, match="other settings: num_epochs was 2, is 3"):
        run_offline(build_config(folder, data, num_epochs=3), out_dir=tmp_path / "sft")
    assert (result.folder / "model.safetensors").stat().st_mtime_ns == stamp
    (result.folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(StorageError, match="is damaged"):
        run_offline(config, out_dir=tmp_path / "sft")


def test_a_finished_folder_notices_changed_rows_but_not_lost_ones(folder, data, tmp_path):
    own, held_out = (shutil.copy(data, tmp_path / name) for name in ("own.jsonl", "held_out.jsonl"))
    config = build_config(folder, own, eval_dataset={"path": str(held_out)}, eval_fraction=0.0)
    result = run_offline(config, out_dir=tmp_path / "sft")
    write_rows(held_out, [build_row(7)])
    with pytest.raises(ConfigError, match="the content of eval_dataset changed"):
        run_offline(config, out_dir=tmp_path / "sft")
    own.unlink()
    held_out.unlink()
    assert run_offline(config, out_dir=tmp_path / "sft") == result


def test_leftovers_of_a_kill_after_the_end_are_removed(folder, data, tmp_path):
    config = build_config(folder, data)
    result = run_offline(config, out_dir=tmp_path / "sft")
    names = {path.name for path in (tmp_path / "sft").iterdir()}
    shutil.copytree(result.folder, tmp_path / "sft" / "global_step_3")
    shutil.copytree(result.folder, tmp_path / "sft" / "global_step_4.tmp-123")
    assert run_offline(config, out_dir=tmp_path / "sft") == result
    assert {path.name for path in (tmp_path / "sft").iterdir()} == names


def test_a_partially_copied_result_is_rewritten(folder, data, tmp_path):
    config = build_config(folder, data)
    result = run_offline(config, out_dir=tmp_path / "sft")
    expected = load_file(result.folder / "model.safetensors")
    (result.folder / "DONE.json").unlink()
    (result.folder / "model.safetensors").write_bytes(b"half")
    again = load_file(run_offline(config, out_dir=tmp_path / "sft").folder / "model.safetensors")
    assert all((expected[name] == again[name]).all() for name in expected)


def test_invalid_input_is_found_before_training(folder, data, tmp_path):
    out = tmp_path / "out"
    for config, kind, match in (
        (build_config(folder, data, max_model_len=10**6), ModelError, "longer than the model"),
        (build_config(folder, tmp_path / "nothing"), DataError, "does not exist"),
        (build_config(tmp_path, data), ModelError, "without config.json"),
    ):
        with pytest.raises(kind, match=match):
            run_offline(config, out_dir=out)
    assert not out.exists()
    with pytest.raises(StorageError, match=r"already holds other files \(rows.jsonl"):
        run_offline(build_config(folder, data), out_dir=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "run.lock"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text("project: another\n")
    with pytest.raises(StorageError, match=r"already holds other files \(config.yaml: project is not a known key"):
        run_offline(build_config(folder, data), out_dir=other)


def test_invalid_settings_are_refused():
    for settings, match in (
        ({"trainer": {}}, "trainer.learning_rate must be set to train all weights"),
        (
            {"trainer": {"learning_rate": 1e-3, "num_minibatches": 2}},
            "num_minibatches=2 has no effect: nothing is",
        ),
        ({"model": {"path": "m", "temperature": 0.5}}, "model.temperature=0.5 has no effect: nothing is sampled"),
        ({"model": {"path": "m", "max_tokens": 9}}, "model.max_tokens=9 has no effect: nothing is sampled"),
        ({"eval_fraction": 0.1, "eval_dataset": {"path": "e"}}, "both given"),
        ({"epochs": 2}, "did you mean 'num_epochs'"),
    ):
        with pytest.raises(ConfigError, match=match):
            build_config("m", "d", **settings)
    assert build_config("m", "d", lora=LoraSection(), trainer={}).trainer.learning_rate == 2e-4


def test_a_saved_config_reads_back_equal(tmp_path):
    config = build_config("m", "d", lora=LoraSection(target_modules=("q_proj",)))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_section(SftConfig, tmp_path / "config.yaml") == config


def test_a_full_disk_is_one_sentence_and_the_run_can_be_resumed(folder, data, tmp_path):
    config = build_config(folder, data, save_interval_steps=2)
    whole = run_offline(config, out_dir=tmp_path / "whole")
    run = RunRecord(tmp_path / "sft")
    with full_disk(200_000), pytest.raises(StorageError, match="cannot write") as raised:
        run_offline(config, out_dir=tmp_path / "sft")
    assert run.state == "failed"
    assert run.error == {"step": 2, "error": "StorageError", "message": str(raised.value)}
    assert not list((tmp_path / "sft").glob("*.tmp-*"))
    result = run_offline(config, out_dir=tmp_path / "sft")
    assert run.state == "finished" and run.error is None
    one, other = (load_file(each.folder / "model.safetensors") for each in (whole, result))
    assert all((one[name] == other[name]).all() for name in one)


@pytest.fixture
def limits(monkeypatch):
    """A list with one number: of the steps after which a training fails."""
    step, limits = Trainer.step, [0]

    def fail(self, *args, **kwargs):
        if self.num_steps >= limits[0]:
            raise TrainingError("the device is out of memory: lower trainer.max_tokens_per_row")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", fail)
    return limits


def test_changed_rows_are_refused_after_the_first_checkpoint_if_their_digest_is_known(folder, data, tmp_path, limits):
    config, text = build_config(folder, data, save_interval_steps=1), data.read_text()
    data.write_text(text.replace("answer is", "result is"))
    with pytest.raises(TrainingError):
        run_offline(config, out_dir=tmp_path / "sft")
    data.write_text(text)  # no step was made
    limits[0] = 2
    with pytest.raises(TrainingError):
        run_offline(config, out_dir=tmp_path / "sft")
    write_rows(data, [build_row(number) for number in range(20, 23)])
    with pytest.raises(ConfigError, match=r"sft was made with other settings: the content of train_dataset changed\."):
        run_offline(config, out_dir=tmp_path / "sft")
    data.write_text(text)
    limits[0] = 3
    with pytest.raises(TrainingError):
        run_offline(config, out_dir=tmp_path / "sft")
    (tmp_path / "sft/sources.json").unlink()  # as an earlier version left it
    data.write_text(text.replace("answer is", "result is"))
    limits[0] = 1000
    assert run_offline(config, out_dir=tmp_path / "sft").num_steps > 3


def test_a_run_out_of_memory_resumes_with_smaller_rows_and_with_any_settings_before_its_first_checkpoint(
    folder, data, tmp_path, limits
):
    smaller = SftTrainerSection(learning_rate=1e-2, max_tokens_per_row=120)
    for changes, limit in ({}, 0), ({"num_epochs": 1}, 0), ({}, 2), ({"trainer": smaller}, 4):
        limits[0] = limit
        with pytest.raises(TrainingError, match="out of memory"):
            run_offline(build_config(folder, data, save_interval_steps=1, **changes), out_dir=tmp_path / "sft")
        assert bool(find_checkpoints(tmp_path / "sft")) == (limit > 0)
    with pytest.raises(ConfigError, match="other settings: num_epochs was 2, is 1"):
        run_offline(build_config(folder, data, num_epochs=1), out_dir=tmp_path / "sft")
    limits[0] = 1000
    assert run_offline(build_config(folder, data, trainer=smaller), out_dir=tmp_path / "sft").num_steps > 4


@pytest.mark.parametrize("algorithm_type", ["sft_is", "sft_phi"])
def test_sft_losses_may_be_weighted_by_the_models_probabilities(folder, data, tmp_path, algorithm_type):
    """The losses are below cross entropy, and the resulting weights differ."""
    plain = run_offline(build_config(folder, data, num_epochs=1), out_dir=tmp_path / "sft")
    weighed = run_offline(
        build_config(folder, data, num_epochs=1, algorithm_type=algorithm_type), out_dir=tmp_path / "own"
    )
    first = [read_metrics(tmp_path / name)[0]["train/loss"] for name in ("sft", "own")]
    assert 0 < first[1] < first[0]
    one, other = (load_file(result.folder / "model.safetensors") for result in (plain, weighed))
    assert any((one[name] != other[name]).any() for name in one)


def test_the_end_of_a_training_writes_the_model_and_no_checkpoint(folder, data, tmp_path, monkeypatch):
    """Unless one is to be kept: a checkpoint has the optimizer's state, several times the size of the model."""
    monkeypatch.setattr(train, "save_checkpoint", lambda *arguments, **options: pytest.fail("wrote a checkpoint"))
    config = build_config(folder, data, save_interval_steps=1000, save_interval_s=None)
    result = run_offline(config, out_dir=tmp_path / "out")
    assert result.best_step == result.num_steps
    check_complete(result.folder)


@pytest.mark.parametrize(("num_kept", "num_found"), [(None, 0), (1, 1), (2, 2), (100, 6)])
def test_keep_checkpoints_bounds_the_number_of_checkpoints(folder, data, tmp_path, num_kept, num_found):
    config = build_config(folder, data, save_interval_steps=1, keep_checkpoints=num_kept, max_tokens_per_batch=500)
    result = run_offline(config, out_dir=tmp_path / "out")
    found = find_checkpoints(tmp_path / "out")
    steps = range(result.num_steps - min(num_found, result.num_steps) + 1, result.num_steps + 1)
    assert [path.name for path in found] == [f"global_step_{step}" for step in steps]
    assert run_offline(config, out_dir=tmp_path / "out") == result
    assert find_checkpoints(tmp_path / "out") == found
