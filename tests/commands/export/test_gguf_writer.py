"""GGUF files read back: values by the gguf package, logits by transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

gguf = pytest.importorskip("gguf")

from exported_models import CHAT, CONFIGS, build_random_model, build_tokenizer  # noqa: E402
from gguf_files import build_gguf_plan, write_tiny_gguf  # noqa: E402
from tunesmith.commands.export.gguf.writer import pair_rotated_rows, write_gguf  # noqa: E402
from tunesmith.commands.export.run import run_export  # noqa: E402
from tunesmith.config import ExportSection  # noqa: E402
from tunesmith.errors import ModelError  # noqa: E402
from tunesmith.model.load import load_model  # noqa: E402
from tunesmith.model.prepare import prepare_model  # noqa: E402

IDS = torch.tensor([[1, 17, 300, 5, 42, 42, 99, 260, 8, 2, 31]])


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensor values by name, in float32."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in tensors}


def count_types(path: Path) -> Counter[str]:
    return Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)


@torch.inference_mode()
def compute_logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", ["smollm", "qwen2", "qwen3"])
def test_transformers_computes_the_same_logits_from_the_file(name, tmp_path):
    model = write_tiny_gguf(name, tmp_path / "m.gguf", file_type="f32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert torch.allclose(compute_logits(loaded), compute_logits(model), atol=1e-5)


def test_f16_rounds_matrices_and_keeps_vectors_in_f32(tmp_path):
    model = write_tiny_gguf("qwen3", tmp_path / "m.gguf", file_type="f16")
    values = read_tensors(tmp_path / "m.gguf")
    state = model.state_dict()
    down, norm = state["model.layers.1.mlp.down_proj.weight"], state["model.layers.1.self_attn.q_norm.weight"]
    assert np.array_equal(values["blk.1.ffn_down.weight"], down.half().float().numpy())
    assert np.array_equal(values["blk.1.attn_q_norm.weight"], norm.numpy())
    assert np.array_equal(values["output.weight"], state["lm_head.weight"].half().float().numpy())
    assert count_types(tmp_path / "m.gguf") == {"F16": 16, "F32": 9}


def test_q8_0_error_is_at_most_half_a_quantization_step(tmp_path):
    model = write_tiny_gguf("qwen2", tmp_path / "m.gguf", file_type="q8_0")
    found = read_tensors(tmp_path / "m.gguf")["blk.0.ffn_gate.weight"]
    expected = model.state_dict()["model.layers.0.mlp.gate_proj.weight"].numpy()
    steps = np.abs(expected.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    error = np.abs(found - expected).reshape(-1, 32)
    assert (error <= steps * 0.502 + 127 * steps * 2**-11).all() and error.max() > 0


def test_rows_that_are_no_multiple_of_a_block_are_f16(tmp_path):
    model = build_random_model(CONFIGS["qwen2"].__class__(**CONFIGS["qwen2"].to_dict() | {"intermediate_size": 40}))
    write_gguf(tmp_path / "m.gguf", model, build_gguf_plan(model), file_type="q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


def test_tied_embeddings_are_written_once(tmp_path):
    write_tiny_gguf("smollm", tmp_path / "tied.gguf", file_type="f32")
    write_tiny_gguf("llama", tmp_path / "untied.gguf", file_type="f32")
    assert "output.weight" not in read_tensors(tmp_path / "tied.gguf")
    assert {"output.weight", "rope_freqs.weight"} <= read_tensors(tmp_path / "untied.gguf").keys()


def test_a_head_that_merging_has_untied_is_written(tmp_path):
    model = build_random_model(CONFIGS["smollm"])
    plan = build_gguf_plan(model)  # from the config of the base, whose head is tied
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    write_gguf(tmp_path / "m.gguf", model, plan, file_type="f32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert torch.allclose(compute_logits(loaded), compute_logits(model), atol=1e-5)


def test_rotary_rows_are_reordered_into_pairs():
    rows = torch.arange(8.0)[:, None].expand(8, 3)  # two heads of four rows
    assert pair_rotated_rows(rows, num_heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_tokenizer_is_read_back(tmp_path):
    write_tiny_gguf("smollm", tmp_path / "m.gguf", file_type="f32")
    source = build_tokenizer("smollm")
    loaded = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    loaded.backend_tokenizer.pre_tokenizer = (
        source.backend_tokenizer.pre_tokenizer
    )  # transformers ignores the pre-tokenizer's name
    text = "<|im_start|>user\nThe farmer's 12 hens!<|im_end|>\n"
    assert loaded(text)["input_ids"] == source(text)["input_ids"]
    assert loaded.chat_template == CHAT
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 2
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert (fields["general.name"].contents(), fields["general.license"].contents()) == ("tiny", "mit")


@pytest.mark.parametrize(("value", "message"), [(1e6, "beyond f16; set gguf_types to f32"), (np.nan, "not finite")])
def test_values_out_of_the_range_of_f16_are_refused(value, message, tmp_path):
    model = build_random_model(CONFIGS["qwen2"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = value
    with pytest.raises(ModelError, match=f"blk.1.ffn_up.weight has values.*{message}"):
        write_gguf(tmp_path / "m.gguf", model, build_gguf_plan(model), file_type="f16")


def test_a_tensor_that_gguf_has_no_name_for_is_refused(tmp_path):
    model = build_random_model(CONFIGS["qwen2"])
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ModelError, match="no name for the model's tensor extra"):
        write_gguf(tmp_path / "m.gguf", model, build_gguf_plan(model), file_type="f32")
    assert not (tmp_path / "m.gguf").exists()


def test_the_exported_pocket_model_computes_the_same_logits(tmp_path):
    folder = prepare_model("pocket-gguf", tmp_path / "pocket-gguf")
    settings = ExportSection(path=str(folder), formats=("gguf",), gguf_types=("f32",))
    file = run_export(settings, out_dir=tmp_path / "out").gguf["f32"]
    models = (load_model(str(path), dtype=torch.float32, device=torch.device("cpu")) for path in (folder, file))
    before, after = (compute_logits(model) for model in models)
    assert torch.allclose(before, after, atol=1e-5)
