"""Loading from a folder, a hub id or a .gguf file, and one clear sentence for each thing that can be wrong."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Llama4TextConfig,
    OlmoHybridConfig,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
)

from gguf_files import write_tiny_gguf
from tiny_models import build_tiny
from tunesmith.commands.export.run import run_export
from tunesmith.config import ExportSection, LoraSection
from tunesmith.errors import ConfigError, ModelError
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.forward.logits import verify_model
from tunesmith.model.load import (
    check_lengths,
    check_model,
    check_vocabulary,
    complete_gguf_tokenizer,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.model.source.fingerprint import compute_fingerprint
from tunesmith.model.source.resolve import find_model
from tunesmith.model.torch_modes import set_num_threads

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return build_pocket_tokenizer()


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    build_pocket_model(tokenizer, hidden_size=96, num_layers=1).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def test_loaded_model_computes_what_transformers_computes(folder):
    ids = torch.arange(12)[None]
    model = load_model(str(folder), dtype=torch.float32, device=CPU)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_dtype_is_as_requested(folder):
    assert load_model(str(folder), dtype=torch.bfloat16, device=CPU).dtype == torch.bfloat16


def test_auto_device_and_dtype():
    device = resolve_device("auto")
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda:0")) == torch.bfloat16
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16


def test_missing_device_is_refused():
    for name in ("gpu", "cuda:99", "mps"):
        with pytest.raises(ModelError, match="model.device"):
            resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_explained():
    reason = "torch finds no GPU|torch cannot use the NVIDIA GPU|this torch is a CPU build"
    with pytest.raises(ModelError, match=rf"model\.device='cuda': this machine has 0 CUDA devices, because ({reason})"):
        resolve_device("cuda")


def test_missing_path_is_refused(tmp_path):
    for path in (str(tmp_path / "nothing"), "./nothing", str(tmp_path / "nothing.gguf")):
        with pytest.raises(ModelError, match="no such"):
            check_model(path, max_model_len=16)


def test_gguf_without_its_reader_names_the_install_command(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'tunesmith\[gguf\]'"):
        check_model(str(tmp_path / "model.gguf"), max_model_len=16)


def test_tokens_that_the_reader_of_a_gguf_file_left_out_are_added(tmp_path):
    pytest.importorskip("gguf")
    write_tiny_gguf("qwen2", tmp_path / "model.gguf")
    full = load_tokenizer(str(tmp_path / "model.gguf"))
    parts = json.loads(full.backend_tokenizer.to_str())
    added, parts["added_tokens"] = parts["added_tokens"], []
    parts["model"]["vocab"] |= {each["content"]: each["id"] for each in added}
    contents, backend = [each["content"] for each in added], Tokenizer.from_str(json.dumps(parts))
    poor, text = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=contents[0]), "".join(contents)
    assert len(added) > 2 and len(poor(text).input_ids) > len(added)
    complete_gguf_tokenizer(tmp_path / "model.gguf", poor)
    assert poor(text).input_ids == full(text).input_ids == [each["id"] for each in added]
    assert poor.eos_token == full.eos_token != contents[0]
    assert poor.decode(poor(text).input_ids, skip_special_tokens=True) == full.decode(
        full(text).input_ids, skip_special_tokens=True
    )


def test_broken_gguf_is_one_sentence(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(ModelError, match="cannot be loaded"):
        check_model(str(tmp_path / "model.gguf"), max_model_len=16)


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match="without config.json"):
        check_model(str(tmp_path), max_model_len=16)


def test_file_that_is_not_a_model_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="give the folder"):
        check_model(str(tmp_path / "weights.bin"), max_model_len=16)


def test_hub_id_that_cannot_be_downloaded_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="is not a local folder, and it was not found in the cache of the hub"):
        check_model("nobody/no-such-model", max_model_len=16)


def test_broken_config_is_one_sentence(tmp_path):
    for text in ("{", "{}", '{"model_type": "llama", "hidden_size": "many"}'):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match="cannot be loaded"):
            check_model(str(tmp_path), max_model_len=16)


def test_a_folder_without_tokenizer_is_refused_by_what_it_lacks(folder, tmp_path):
    for path in folder.iterdir():
        if not path.name.startswith("tokenizer"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match="has no tokenizer: copy the model's tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_damaged_weights_are_one_sentence(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path), dtype=torch.float32, device=CPU)


def test_context_longer_than_the_models_positions_is_refused(folder):
    assert check_model(str(folder), max_model_len=16384).max_position_embeddings == 16384
    with pytest.raises(ModelError, match="max_model_len=16385 is longer than the model's 16384 positions"):
        check_model(str(folder), max_model_len=16385)


def test_a_model_without_a_position_limit_takes_any_context():
    check_lengths(BloomConfig(), 10**9)


def test_tokenizer_without_chat_template_names_the_knob(tokenizer, tmp_path):
    bare = build_pocket_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    build_pocket_model(tokenizer, hidden_size=96, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="model.chat_template"):
        load_tokenizer(str(tmp_path))
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}!", encoding="utf-8")
    loaded = load_tokenizer(str(tmp_path), chat_template=str(template))
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\x00")
    for name, reason in {
        "nothing.jinja": "No such file",
        "binary.jinja": "can't decode",
        ".": "Is a directory",
    }.items():
        with pytest.raises(ModelError, match=f"^model.chat_template=.* is not a jinja file: .*{reason}"):
            load_tokenizer(str(tmp_path), chat_template=str(tmp_path / name))


def test_tokenizer_of_another_model_is_refused(tokenizer):
    model = build_pocket_model(tokenizer, hidden_size=96, num_layers=1)
    check_vocabulary(model, tokenizer)
    model.resize_token_embeddings(100)
    with pytest.raises(ModelError, match="do not belong together"):
        check_vocabulary(model, tokenizer)


def test_architecture_without_attention_interface_is_refused(tmp_path):
    BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="BloomForCausalLM"):
        load_model(str(tmp_path), dtype=torch.float32, device=CPU)


def test_a_chat_template_with_a_syntax_error_is_one_sentence(folder, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}\n{% if %}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"own.jinja' has a syntax error in line 2: .*model.chat_template"):
        load_tokenizer(str(folder), chat_template=str(template))


class Evil:
    def __reduce__(self):
        return print, ("this pickle ran code",)


def test_a_refused_pickle_is_one_sentence_and_does_not_run(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save({"weights": Evil()}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle with more than tensors"):
        load_model(str(tmp_path / "pickled"), dtype=torch.float32, device=CPU)
    assert "ran code" not in capsys.readouterr().out


def test_non_finite_weights_are_named(folder):
    model = load_model(str(folder), dtype=torch.float32, device=CPU)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"weights are not finite \(model.layers.0.mlp.up_proj.weight\)"):
        verify_model(model)


def test_the_folder_of_an_export_is_a_model_path(folder, tmp_path):
    run_export(ExportSection(path=str(folder), name="tiny"), out_dir=tmp_path / "out")
    assert check_model(str(tmp_path / "out"), max_model_len=16).hidden_size == 96
    assert load_tokenizer(str(tmp_path / "out")).chat_template
    model = load_model(str(tmp_path / "out"), dtype=torch.float32, device=CPU)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids).logits, load_model(str(folder), dtype=torch.float32, device=CPU)(ids).logits
        )
    again = run_export(ExportSection(path=str(tmp_path / "out")), out_dir=tmp_path / "again")
    assert again.hf is not None
    assert compute_fingerprint(str(tmp_path / "out")) == compute_fingerprint(str(folder))


def test_an_export_with_gguf_only_names_its_file(tmp_path):
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "tiny-f16.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="an export with GGUF files only: name one of them, such as .*tiny-f16.gguf"):
        check_model(str(tmp_path), max_model_len=16)


def test_the_adapter_of_an_export_is_a_model_path(folder, tmp_path):
    model = load_model(str(folder), dtype=torch.float32, device=CPU, lora=LoraSection(r=2))
    save_model_files(tmp_path / "trained", model, load_tokenizer(str(folder)))
    run_export(ExportSection(path=str(tmp_path / "trained"), formats=("adapter",)), out_dir=tmp_path / "out")
    assert find_model(str(tmp_path / "out")).adapter.folder == tmp_path / "out" / "adapter"


def test_far_more_threads_than_cpus_are_refused():
    with pytest.raises(ConfigError, match="num_cpu_threads=1000: this machine has"):
        set_num_threads(1000)


SHARED = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16, "head_dim": 8}
SUPPORTED = "supported are text models of transformers in which every layer is of type full_attention or sliding_atten"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (OlmoHybridConfig(**SHARED), "'olmo_hybrid' with layers of type linear_attention, full_attention"),
        (Llama4TextConfig(**SHARED), "'llama4_text' with layers of type chunked_attention"),
        (Qwen2AudioConfig(), "'qwen2' .*: transformers has no causal language model for it"),
    ],
)
def test_an_unsupported_architecture_is_refused_before_its_weights_are_read(config, reason, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{reason}.*{SUPPORTED}"):
        check_model(str(tmp_path), max_model_len=16)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "glm4_moe", "deepseek_v3", "gpt_oss", "gemma4"])
def test_families_that_transformers_loads_with_other_attention_or_sizes_are_loaded(name, tmp_path):
    """`sdpa` has no cap on scores, and latent attention has keys and values of different sizes."""
    expected = build_tiny(name)
    copy.deepcopy(expected).save_pretrained(tmp_path)
    check_model(str(tmp_path), max_model_len=64)
    model = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    verify_model(model)
    ids = torch.arange(3, 30)[None]
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_model_without_one_of_its_weights_is_refused(name, folder, tmp_path):
    """transformers draws it at random, and warns."""
    shutil.copytree(folder, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks 1 of the weights .* such as {name}"):
        load_model(str(tmp_path / "model"), dtype=torch.float32, device=CPU)


def change_config(folder, tmp_path, **values):
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return str(tmp_path / "model")


def test_quantized_weights_are_refused_without_an_adapter(folder, tmp_path):
    path = change_config(folder, tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ModelError, match=r"holds quantized weights \(bitsandbytes\)"):
        check_model(path, max_model_len=64)
    with pytest.raises(ModelError, match=r"holds quantized weights \(bitsandbytes\)"):
        load_model(path, dtype=torch.float32, device=CPU)
    check_model(path, max_model_len=64, lora=LoraSection())


def test_a_package_that_modeling_code_needs_is_named(folder, tmp_path):
    path = change_config(folder, tmp_path, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (tmp_path / "model" / "modeling_own.py").write_text("import no_such_package\n")
    with pytest.raises(ModelError, match="cannot be loaded: .*no_such_package"):
        load_model(path, dtype=torch.float32, device=CPU, trust_remote_code=True)


def test_an_empty_path_is_not_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"^model\.path is empty"):
        find_model("")
