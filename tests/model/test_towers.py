"""Text of vision-language checkpoints: the decoder is trained, and every other tower is saved as it was."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    Gemma4Config,
    PreTrainedModel,
    Qwen3_5Config,
)

from tiny_models import CONFIGS, GEMMA_SIZES, LINEAR, ROPE_AXES, VISION
from tunesmith.commands.export.run import run_export
from tunesmith.config import ExportSection, LoraSection
from tunesmith.model.checkpoint import save_checkpoint, save_model_files
from tunesmith.model.forward.logits import verify_model
from tunesmith.model.load import check_model, load_model
from tunesmith.model.pocket import build_pocket_tokenizer
from tunesmith.model.towers import find_auto_class, list_towers

CPU = torch.device("cpu")
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}
IDS = torch.arange(5, 29)[None]


def save_source(folder, config):
    """A checkpoint with a vocabulary as large as the tokenizer's and the settings of an image processor."""
    tokenizer = build_pocket_tokenizer()
    config.text_config.vocab_size = len(tokenizer)
    if hasattr(config.text_config, "vocab_size_per_layer_input"):
        config.text_config.vocab_size_per_layer_input = len(tokenizer)
    config.text_config.pad_token_id = 0
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


ROPE = ROPE_AXES | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SOURCES = {
    "qwen2_5_vl": lambda: CONFIGS["qwen2_5_vl"],
    "qwen3_vl": lambda: CONFIGS["qwen3_vl"],
    "qwen3_5": lambda: Qwen3_5Config(text_config=LINEAR | {"rope_parameters": ROPE}, vision_config=VISION),
    "gemma4": lambda: Gemma4Config(
        text_config=CONFIGS["gemma4"],
        vision_config=TOWER | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "patch_size": 4},
        audio_config=TOWER | {"output_proj_dims": 12, "subsampling_conv_channels": [4, 2]},
    ),
}
TOWERS = {"gemma4": ["model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"]}


@pytest.fixture(scope="module", params=SOURCES)
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_source(folder, SOURCES[request.param]())
    return folder


def load(folder, **options) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32, device=CPU, **options)


@torch.no_grad()
def train(model: PreTrainedModel) -> PreTrainedModel:
    """Change what takes gradients."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def is_in(name: str, towers: list[str]) -> bool:
    return name.startswith(tuple(f"{tower}." for tower in towers))


def test_only_the_text_decoder_takes_gradients(source):
    check_model(str(source), max_model_len=64)
    model = load(source)
    verify_model(model)
    towers = TOWERS.get(source.name[:-1], ["model.visual"])
    assert sorted(list_towers(model)) == sorted(towers)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if not is_in(name, towers)}


@torch.no_grad()
def test_a_trained_model_is_saved_and_exported_with_every_tower(source, tmp_path):
    before = AutoModelForImageTextToText.from_pretrained(source)
    model = train(load(source))
    tokenizer = AutoTokenizer.from_pretrained(source)
    save_checkpoint(tmp_path / "global_step_1", model, tokenizer, trainer_state={}, run_state={})
    report = run_export(ExportSection(path=str(tmp_path / "global_step_1")), out_dir=tmp_path / "out")
    assert json.loads((report.hf / "preprocessor_config.json").read_text()) == PROCESSOR
    after, info = AutoModelForImageTextToText.from_pretrained(report.hf, output_loading_info=True)
    assert type(after) is type(before)
    assert after.config.model_type == before.config.model_type
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(after(IDS).logits, model(IDS).logits)
    assert not torch.equal(after(IDS).logits, before(IDS).logits)
    old, new = before.state_dict(), after.state_dict()
    others = [name for name in old if is_in(name, list_towers(model))]
    assert len(others) > 10
    assert all(torch.equal(old[name], new[name]) for name in others)


@torch.no_grad()
def test_an_adapter_is_in_the_text_decoder_only_and_merges_into_the_whole_checkpoint(tmp_path):
    """Gemma 3's vision tower has layers of the same names as its text decoder."""
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    config = Gemma3Config(text_config=GEMMA_SIZES, vision_config=vision, mm_tokens_per_image=4)
    save_source(tmp_path / "source", config)
    for targets in ("attention", "all-linear", ("q_proj",)):
        adapted = load(tmp_path / "source", lora=LoraSection(r=2, target_modules=targets))
        names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        assert names
        assert all(name.startswith("model.language_model.layers.") for name in names)
    expected = train(adapted)(IDS).logits
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    save_model_files(tmp_path / "adapter", adapted, tokenizer)
    report = run_export(ExportSection(path=str(tmp_path / "adapter")), out_dir=tmp_path / "out")
    merged = AutoModelForImageTextToText.from_pretrained(report.hf)
    assert list_towers(merged) == ["model.vision_tower", "model.multi_modal_projector"]
    torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_text_model_that_only_the_class_for_images_builds_is_built_by_it():
    assert find_auto_class(CONFIG_MAPPING["mistral4"]()) is AutoModelForImageTextToText
