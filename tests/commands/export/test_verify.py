"""Verification finds files that do not reproduce the source model."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from exported_models import build_tokenizer
from gguf_files import write_tiny_gguf
from tunesmith.commands.export.llama_cpp import GgufModel
from tunesmith.commands.export.verify import (
    build_prompts,
    check_gguf_file,
    compute_divergence,
    compute_logits,
)
from tunesmith.errors import ModelError


@pytest.mark.parametrize("wrong", [{"rotated_heads": {}}, {"rope_factors": None}])
def test_a_file_with_wrong_computations_is_found(wrong, tmp_path):
    model, tokenizer = write_tiny_gguf("llama", tmp_path / "right.gguf"), build_tokenizer("llama-bpe")
    write_tiny_gguf("llama", tmp_path / "wrong.gguf", **wrong)
    prompts = build_prompts(tokenizer)
    expected = compute_logits(model, prompts)
    with GgufModel(tmp_path / "right.gguf", context=512, num_threads=1) as gguf_model:
        figures = check_gguf_file(gguf_model, tokenizer, prompts, expected, file_type="f32")
    assert figures["kl_mean"] < 1e-9 and figures["same_top_token"] == 1.0
    with (
        GgufModel(tmp_path / "wrong.gguf", context=512, num_threads=1) as gguf_model,
        pytest.raises(ModelError, match="differs from the model: KL divergence"),
    ):
        check_gguf_file(gguf_model, tokenizer, prompts, expected, file_type="f32")


def test_text_with_other_token_ids_is_found(tmp_path):
    write_tiny_gguf("smollm", tmp_path / "m.gguf")
    tokenizer = build_tokenizer("gpt-2")
    with (
        GgufModel(tmp_path / "m.gguf", context=64, num_threads=1) as gguf_model,
        pytest.raises(ModelError, match="llama.cpp encodes '.*' as .*, the model's tokenizer as"),
    ):
        check_gguf_file(gguf_model, tokenizer, build_prompts(tokenizer), [], file_type="f32")


def test_divergence_of_two_coins_worked_out_by_hand():
    fair, biased = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    assert compute_divergence(fair, biased).item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2))
    assert compute_divergence(fair, fair + 7).item() == pytest.approx(0, abs=1e-12)
