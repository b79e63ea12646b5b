"""GGUF files as Hugging Face folders: equal logits, tied heads, split rules; what is read wrongly is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from exported_models import TOKENIZERS, build_tokenizer
from tunesmith.cli import app
from tunesmith.commands.export.convert import convert_gguf
from tunesmith.commands.export.verify import TOKENIZER_TEXTS
from tunesmith.errors import ModelError, StorageError
from tunesmith.model.load import load_model

gguf = pytest.importorskip("gguf")

from gguf_files import write_tiny_gguf  # noqa: E402  # needs gguf

IDS = torch.tensor([[1, 17, 300, 5, 42, 42, 99, 260, 8, 2, 31]])


@torch.inference_mode()
def compute_logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


def add_head(source: Path, target: Path, head: torch.Tensor, kind: str, embedding_kind: str) -> None:
    """Copy a GGUF file with the head stored beside the embedding, both quantized."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            types = field.types
            writer.add_key_value(name, field.contents(), types[0], types[-1] if len(types) > 1 else None)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    for name, data in {**tensors, "output.weight": head}.items():
        kinds = {"output.weight": kind, "token_embd.weight": embedding_kind}
        storage = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        writer.add_tensor(name, gguf.quants.quantize(data.numpy(), storage), raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["smollm", "qwen2", "qwen3"])
def test_a_folder_has_the_models_logits_and_tokens(name, tmp_path):
    model = write_tiny_gguf(name, tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["model", "convert", str(tmp_path / "tiny.gguf"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith(str(out))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(compute_logits(loaded), compute_logits(model))
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    tokenizer, expected = AutoTokenizer.from_pretrained(out), build_tokenizer(TOKENIZERS[name])
    for text in (*TOKENIZER_TEXTS, "cafe\u0301 12345"):
        assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]
    assert tokenizer.model_max_length == 512 and tokenizer.chat_template == expected.chat_template


@pytest.mark.parametrize(("head_kind", "embedding_kind"), [("Q8_0", "Q5_0"), ("Q4_0", "Q8_0")])
def test_a_head_that_is_the_embedding_in_another_quantization_is_tied_and_the_finer_kept(
    head_kind, embedding_kind, tmp_path, caplog
):
    model = write_tiny_gguf("qwen2", tmp_path / "tied.gguf")
    matrix = model.get_input_embeddings().weight.detach().clone()
    add_head(tmp_path / "tied.gguf", tmp_path / "stored_twice.gguf", matrix, head_kind, embedding_kind)
    convert_gguf(tmp_path / "stored_twice.gguf", out_dir=tmp_path / "out")
    kept = "output.weight" if head_kind == "Q8_0" else "token_embd.weight"
    assert f"tied, both take {kept}" in caplog.text
    stored = gguf.quants.quantize(matrix.numpy(), gguf.GGMLQuantizationType.Q8_0)
    with torch.no_grad():
        values = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q8_0)
        model.get_input_embeddings().weight.copy_(torch.from_numpy(values))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.tie_word_embeddings and loaded.num_parameters() == model.num_parameters()
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(compute_logits(loaded), compute_logits(model))


def test_a_head_of_its_own_stays_untied(tmp_path):
    write_tiny_gguf("qwen3", tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", out_dir=tmp_path / "out", dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert not loaded.config.tie_word_embeddings and loaded.dtype == torch.bfloat16


def test_nothing_is_overwritten(tmp_path):
    write_tiny_gguf("qwen2", tmp_path / "m.gguf")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("x")
    with pytest.raises(StorageError, match=r"already holds .*mine.txt"):
        convert_gguf(tmp_path / "m.gguf", out_dir=tmp_path / "used")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("llama-biased", r"tensors are left out \(biases, rotary factors\)"),
        ("llama", r"tensors are left out \(biases, rotary factors\)"),
        ("qwen2-yarn", r"scales its rotary embeddings \(yarn\)"),
        ("smollm3", "architecture smollm3 is not supported"),
    ],
)
def test_a_file_that_transformers_reads_wrongly_is_refused(name, match, tmp_path):
    write_tiny_gguf(name, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=match):
        convert_gguf(tmp_path / "m.gguf", out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match=match):
        load_model(str(tmp_path / "m.gguf"), dtype=torch.float32, device=torch.device("cpu"))


def test_wrong_arguments_are_one_sentence(tmp_path):
    with pytest.raises(ModelError, match="is not a .gguf file"):
        convert_gguf(tmp_path / "none.gguf", out_dir=tmp_path / "out")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="dtype='int8' is not supported; allowed: float32, bfloat16"):
        convert_gguf(tmp_path / "m.gguf", out_dir=tmp_path / "out", dtype="int8")
