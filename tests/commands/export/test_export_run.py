"""Exports: complete folders or none, equal to their source; errors before anything is written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from exported_models import CONFIGS, build_random_model, build_tokenizer, save_tiny
from fakes import full_disk
from tiny_models import CONFIGS as OTHER_CONFIGS
from tunesmith.cli import app
from tunesmith.commands.export.gguf import files as export_gguf
from tunesmith.commands.export.run import run_export
from tunesmith.config import ExportSection, LoraSection, RunConfig
from tunesmith.errors import ConfigError, ModelError, StorageError
from tunesmith.model.checkpoint import save_checkpoint
from tunesmith.model.load import load_model
from tunesmith.runs.load_config import build_section, dump_config
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import save_link

IDS = torch.tensor([[1, 17, 300, 5, 42, 42, 99, 260, 8, 2, 31]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("smollm", tmp_path_factory.mktemp("models") / "tiny-smollm")


@torch.inference_mode()
def compute_logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS).logits


def list_tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_an_hf_folder_equals_its_source_bit_for_bit(source, tmp_path):
    report = run_export(ExportSection(path=str(source)), out_dir=tmp_path / "out")
    assert (report.folder, report.hf, report.gguf) == (tmp_path / "out", tmp_path / "out" / "hf", {})
    assert report.name == "tiny-smollm" and report.adapter is None
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, report.hf))
    assert torch.equal(compute_logits(before), compute_logits(after))
    assert report.num_parameters == sum(parameter.numel() for parameter in before.parameters())
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, report.hf)]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert list_tree(tmp_path) == sorted(
        ["out", "out/DONE.json", "out/hf"]
        + [f"out/hf/{path.name}" for path in source.iterdir()]
        + ["out/hf/README.md"]
    )  # fmt: skip


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_weights_are_stored_in_the_requested_type(name, source, tmp_path):
    report = run_export(ExportSection(path=str(source), dtype=name), out_dir=tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(report.hf, dtype="auto")
    rounded = AutoModelForCausalLM.from_pretrained(source).to(getattr(torch, name))
    assert loaded.dtype == getattr(torch, name)
    for key, value in rounded.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_the_type_of_the_source_is_the_default(tmp_path):
    folder = save_tiny("qwen2", tmp_path / "model-bf16", dtype=torch.bfloat16)
    report = run_export(ExportSection(path=str(folder)), out_dir=tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(report.hf, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["smollm", "qwen3"])
def test_one_gguf_file_is_written_per_type(name, tmp_path):
    pytest.importorskip("gguf")
    folder = save_tiny(name, tmp_path / "tiny")
    settings = ExportSection(path=str(folder), formats=("gguf",), gguf_types=("f32", "f16", "q8_0"), name="mine")
    report = run_export(settings, out_dir=tmp_path / "out")
    names = [f"mine-{kind}.gguf" for kind in ("f16", "f32", "q8_0")]
    assert list_tree(tmp_path / "out") == [
        *("DONE.json", "gguf", "gguf/Modelfile", "gguf/README.md"),
        *(f"gguf/{name}" for name in names),
    ]
    loaded = AutoModelForCausalLM.from_pretrained(
        report.folder / "gguf", gguf_file=report.gguf["f32"].name, dtype=torch.float32
    )
    assert torch.allclose(compute_logits(loaded), compute_logits(build_random_model(CONFIGS[name])), atol=1e-5)


def test_quantization_leaves_no_temporary_file(source, tmp_path):
    pytest.importorskip("llama_cpp")
    settings = ExportSection(path=str(source), formats=("gguf",), gguf_types=("q4_k_m",))
    report = run_export(settings, out_dir=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "gguf").iterdir()) == [
        "Modelfile",
        "README.md",
        report.gguf["q4_k_m"].name,
    ]
    assert report.checks["gguf/tiny-smollm-q4_k_m.gguf"]["kl_mean"] < 0.5


def test_without_llama_cpp_files_are_written_and_not_compared(source, tmp_path, monkeypatch, caplog):
    pytest.importorskip("gguf")
    monkeypatch.setattr(export_gguf, "has_llama_cpp", lambda: False)
    settings = ExportSection(path=str(source), formats=("gguf",))
    assert run_export(settings, out_dir=tmp_path / "out").checks == {}
    assert "GGUF files will not be verified, because llama-cpp-python is not installed" in caplog.text
    settings = ExportSection(path=str(source), formats=("gguf",), has_verification=True)
    with pytest.raises(ModelError, match=r"has_verification=true .* pip install 'tunesmith\[llama-cpp\]'"):
        run_export(settings, out_dir=tmp_path / "other")
    caplog.clear()
    settings = ExportSection(path=str(source), formats=("gguf",), has_verification=False)
    assert run_export(settings, out_dir=tmp_path / "unverified").checks == {}
    assert not caplog.records
    settings = ExportSection(path=str(source), formats=("gguf",), gguf_types=("q4_k_m",))
    with pytest.raises(ModelError, match=r"q4_k_m needs llama.cpp's quantizer: pip install"):
        run_export(settings, out_dir=tmp_path / "other")


def build_adapter(base: Path, folder: Path) -> PreTrainedModel:
    """Save a PEFT adapter with non-zero weights; return the model with the adapter active."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    model.save_pretrained(folder)
    return model


def test_an_adapter_is_exported_unmerged_and_merged(source, tmp_path):
    expected = compute_logits(build_adapter(source, tmp_path / "solver"))
    settings = ExportSection(path=str(tmp_path / "solver"), formats=("hf", "adapter"))
    report = run_export(settings, out_dir=tmp_path / "out")
    from peft import AutoPeftModelForCausalLM

    live = AutoPeftModelForCausalLM.from_pretrained(report.adapter).eval()
    merged = AutoModelForCausalLM.from_pretrained(report.hf)
    plain = AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(compute_logits(live), expected)
    assert torch.allclose(compute_logits(merged), expected, atol=1e-4)
    assert (compute_logits(plain) - expected).abs().max() > 0.1
    assert "The adapter is merged" in (report.hf / "README.md").read_text()


def test_an_adapter_of_another_base_is_refused(source, tmp_path):
    build_adapter(source, tmp_path / "solver")
    other = save_tiny("qwen3", tmp_path / "other")
    with pytest.raises(ModelError, match="for a base other than"):
        run_export(ExportSection(path=str(tmp_path / "solver"), base_path=str(other)), out_dir=tmp_path / "out")
    with pytest.raises(ConfigError, match="formats holds adapter, but path=.* is a full model"):
        run_export(ExportSection(path=str(source), formats=("adapter",)), out_dir=tmp_path / "out")


def test_the_adapter_of_a_run_is_merged_from_its_last_checkpoint(source, tmp_path):
    pytest.importorskip("peft")
    live = load_model(
        str(source), dtype=torch.float32, device=torch.device("cpu"), lora=LoraSection(target_modules="all-linear")
    )
    with torch.no_grad():
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    folder = tmp_path / "runs" / "lora-run" / "global_step_4"
    folder.parent.mkdir(parents=True)
    save_checkpoint(folder, live, build_tokenizer("smollm"), trainer_state={}, run_state={})
    report = run_export(ExportSection(path=str(folder.parent), formats=("adapter", "hf")), out_dir=tmp_path / "out")
    expected = compute_logits(live)
    assert torch.allclose(compute_logits(AutoModelForCausalLM.from_pretrained(report.hf)), expected, atol=1e-4)
    assert (compute_logits(AutoModelForCausalLM.from_pretrained(source)) - expected).abs().max() > 0.1
    assert (report.adapter / "base_fingerprint.json").is_file() and not (report.adapter / "trainer").exists()


def save_run(root: Path, *, steps: tuple[int, ...]) -> None:
    """A run folder with checkpoints of different weights."""
    root.mkdir(parents=True)
    config = build_section(RunConfig, {"model": {"path": "base"}, "train_dataset": {"path": "data"}})
    (root / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    for step in steps:
        model = build_random_model(CONFIGS["qwen2"], seed=step)
        save_checkpoint(
            root / f"global_step_{step}", model, build_tokenizer("qwen2"), trainer_state={}, run_state={"step": step}
        )


def test_a_run_folder_stands_for_its_last_checkpoint(tmp_path):
    save_run(tmp_path / "my run", steps=(2, 10))
    report = run_export(ExportSection(path=str(tmp_path / "my run")), out_dir=tmp_path / "out")
    expected = compute_logits(build_random_model(CONFIGS["qwen2"], seed=10))
    assert torch.equal(compute_logits(AutoModelForCausalLM.from_pretrained(report.hf)), expected)
    assert report.name == "my-run"
    assert not (report.hf / "trainer").exists() and not (report.hf / "DONE.json").exists()


def test_the_best_checkpoint_of_a_run_is_exported_by_its_link(tmp_path):
    save_run(tmp_path / "solver", steps=(2, 10))
    save_link(tmp_path / "solver" / "best", "global_step_2")
    report = run_export(ExportSection(path=str(tmp_path / "solver" / "best")), out_dir=tmp_path / "out")
    expected = compute_logits(build_random_model(CONFIGS["qwen2"], seed=2))
    assert torch.equal(compute_logits(AutoModelForCausalLM.from_pretrained(report.hf)), expected)
    assert report.name == "solver"


def test_an_incomplete_checkpoint_is_refused(tmp_path):
    save_run(tmp_path / "run", steps=(1,))
    checkpoint = tmp_path / "run" / "global_step_1"
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(StorageError, match="model.safetensors is damaged: it has 1000 bytes"):
        run_export(ExportSection(path=str(tmp_path / "run")), out_dir=tmp_path / "out")
    (checkpoint / "DONE.json").unlink()
    with pytest.raises(ModelError, match="holds no model"):
        run_export(ExportSection(path=str(tmp_path / "run")), out_dir=tmp_path / "out")
    with pytest.raises(StorageError, match="not a complete checkpoint"):
        run_export(ExportSection(path=str(checkpoint)), out_dir=tmp_path / "out")
    checkpoint.rename(tmp_path / "run" / "global_step_1.tmp-77")
    with pytest.raises(ModelError, match="left from an interrupted write"):
        run_export(ExportSection(path=str(tmp_path / "run" / "global_step_1.tmp-77")), out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_export_is_reused_and_another_is_refused(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "model-a")
    settings = ExportSection(path=str(copy))
    first = run_export(settings, out_dir=tmp_path / "out")
    written = (first.hf / "model.safetensors").stat().st_mtime_ns
    assert run_export(settings, out_dir=tmp_path / "out") == first
    assert (first.hf / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match=r"out was made with other settings: license was 'unknown', is 'mit'\."):
        run_export(ExportSection(path=str(copy), license="mit"), out_dir=tmp_path / "out")
    os.utime(copy / "model.safetensors", ns=(1, 1))
    with pytest.raises(ConfigError, match=r"other settings: source\.files\.model\.safetensors was \["):
        run_export(settings, out_dir=tmp_path / "out")


def test_a_damaged_export_is_an_error(source, tmp_path):
    settings = ExportSection(path=str(source))
    report = run_export(settings, out_dir=tmp_path / "out")
    (report.hf / "tokenizer.json").unlink()
    with pytest.raises(StorageError, match="tokenizer.json is damaged"):
        run_export(settings, out_dir=tmp_path / "out")


def test_folders_with_other_files_are_left_unchanged(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("keep", encoding="utf-8")
    with pytest.raises(StorageError, match=r"already holds other files \(thesis.txt\): choose another folder"):
        run_export(ExportSection(path=str(source)), out_dir=tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "keep"


def test_temporary_folders_of_killed_exports_are_removed_and_of_running_ones_kept(source, tmp_path):
    settings, temporary = ExportSection(path=str(source)), tmp_path / "out.tmp-99999999"
    (temporary / "hf").mkdir(parents=True)
    with Workspace(tmp_path / "out", is_whole=True):
        temporary.mkdir()
        with pytest.raises(StorageError, match=f"out is locked by process {os.getpid()}"):
            run_export(settings, out_dir=tmp_path / "out")
        assert temporary.exists()
    run_export(settings, out_dir=tmp_path / "out")
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


@pytest.mark.parametrize(
    ("formats", "gguf_types"),
    [(("hf",), ("f16",)), (("gguf",), ("f32",)), (("gguf",), ("q8_0",)), (("gguf",), ("q4_k_m",))],
)
def test_a_full_disk_leaves_no_partial_output(formats, gguf_types, source, tmp_path):
    if "gguf" in formats:
        pytest.importorskip("llama_cpp" if gguf_types == ("q4_k_m",) else "gguf")
    values = {"path": str(source), "formats": formats, "has_verification": False}
    settings = ExportSection(**values | ({"gguf_types": gguf_types} if "gguf" in formats else {}))
    with full_disk(60_000), pytest.raises(StorageError, match="cannot write|could not quantize"):
        run_export(settings, out_dir=tmp_path / "out")
    assert list_tree(tmp_path) == []


def test_too_little_space_is_an_error_before_writing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 10**6, 0))
    with pytest.raises(StorageError, match="bytes\\) are needed and 0.00 GiB are free"):
        run_export(ExportSection(path=str(source)), out_dir=tmp_path / "out")
    assert list_tree(tmp_path) == []


def test_unsupported_gguf_models_are_refused_before_anything_is_written(pocket_folder, tmp_path):
    pytest.importorskip("gguf")
    settings = ExportSection(path=pocket_folder, formats=("hf", "gguf"))
    with pytest.raises(ModelError, match="split rules match no supported pre-tokenizer of llama.cpp"):
        run_export(settings, out_dir=tmp_path / "out")
    build_random_model(OTHER_CONFIGS["gemma"]).save_pretrained(tmp_path / "gemma")
    build_tokenizer("gpt-2").save_pretrained(tmp_path / "gemma")
    (tmp_path / "gemma" / "model.safetensors").write_text("not weights", encoding="utf-8")
    settings = ExportSection(path=str(tmp_path / "gemma"), formats=("hf", "gguf"))
    with pytest.raises(ModelError, match="'gemma' cannot be written as GGUF"):
        run_export(settings, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_pocket_model_is_exported_as_an_hf_folder(pocket_folder, tmp_path):
    report = run_export(ExportSection(path=pocket_folder), out_dir=tmp_path / "out")
    assert report.checks["hf"]["max_logit_difference"] == 0.0 and report.name == "pocket"


def test_weights_that_are_not_finite_are_refused(source, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    build_tokenizer("smollm").save_pretrained(tmp_path / "broken")
    with pytest.raises(ModelError, match="up_proj.weight are not finite"):
        run_export(ExportSection(path=str(tmp_path / "broken")), out_dir=tmp_path / "out")
    assert list_tree(tmp_path / "broken") and not (tmp_path / "out").exists()


def test_quantized_weights_are_refused(source, tmp_path):
    shutil.copytree(source, tmp_path / "packed")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="holds quantized weights"):
        run_export(ExportSection(path=str(tmp_path / "packed")), out_dir=tmp_path / "out")


def test_a_name_that_llama_cpp_misreads_is_refused(source, tmp_path):
    settings = ExportSection(path=str(source), formats=("gguf",), name="student-of-Phi-3")
    with pytest.raises(ModelError, match="treats a model named 'student-of-Phi-3' as a Phi-3; set another name"):
        run_export(settings, out_dir=tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model.gguf", "is a GGUF file"),
        ("nowhere/at/all/here", "^path='nowhere/at/all/here': there is no such folder"),
        (".", "holds no model: give a folder with config.json"),
    ],
)
def test_paths_without_a_model_are_refused(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        run_export(ExportSection(path=path), out_dir=tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"formats": []}, "formats"),
        ({"formats": ["onnx"]}, "must be 'hf', 'adapter' or 'gguf'"),
        ({"formats": ["hf", "hf"]}, "has a duplicate"),
        ({"gguf_types": ["q8_0"]}, "gguf_types has no effect with formats=hf: set formats=gguf"),
        ({"name": "a/b"}, "name='a/b' must consist of letters"),
        ({"license": " "}, "license=' ' must be one non-empty line"),
        ({"gguf_type": ["f16"]}, "did you mean 'gguf_types'?"),
    ],
)
def test_invalid_settings_are_refused(values, message):
    with pytest.raises(ConfigError) as raised:
        build_section(ExportSection, {"path": "m"} | values)
    assert message in str(raised.value)


def test_a_list_without_its_invalid_item_is_not_called_too_short_as_well():
    with pytest.raises(ConfigError, match="^formats.0 must be 'hf', 'adapter' or 'gguf', got 'onnx'$"):
        build_section(ExportSection, {"path": "m", "formats": ["onnx"]})


def test_the_command_exports_and_prints_the_comparison(source, tmp_path):
    result = CliRunner().invoke(app, ["export", str(source), "--out", str(tmp_path / "out"), "--set", "license=mit"])
    assert result.exit_code == 0, result.output
    assert "ExportResult\n  name  tiny-smollm" in result.output and "/out/hf (num_tokens " in result.output
    record = json.loads((tmp_path / "out" / "DONE.json").read_text())
    assert record["settings"]["license"] == "mit"
    result = CliRunner().invoke(app, ["export", str(source), "--out", str(tmp_path / "x"), "--format", "onnx"])
    assert result.exit_code == 1 and "must be 'hf', 'adapter' or 'gguf'" in result.output
