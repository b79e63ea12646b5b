"""What exact numerics refuse; that sampler and trainer agree to the bit is tested on a GPU (`tests/gpu`)."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, Gemma2Config, Gemma4TextConfig, Qwen3Config, Qwen3MoeConfig

from tunesmith.config import RunConfig
from tunesmith.errors import ModelError
from tunesmith.model.forward.exact import check_exact
from tunesmith.model.torch_modes import is_exact

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "device", "dtype", "reason"),
    [
        (Qwen3Config(), CPU, torch.bfloat16, "it needs a GPU, and model.device is cpu"),
        (Qwen3Config(), CUDA, torch.float32, "it needs weights of 16 bits, and model.dtype is float32"),
        (Qwen3MoeConfig(), CUDA, torch.bfloat16, "routing among experts has no exact kernel"),
        (DeepseekV3Config(), CUDA, torch.bfloat16, "routing among experts has no exact kernel"),
        (Qwen3Config(vocab_size=4001), CUDA, torch.bfloat16, "sizes that are not multiples of 8"),
        (
            Gemma4TextConfig(num_kv_shared_layers=4),
            CUDA,
            torch.bfloat16,
            "layers that read the keys and values of others",
        ),
        (Gemma2Config(), CUDA, torch.bfloat16, "logits that are scaled or capped have no exact kernel"),
    ],
)
def test_what_has_no_exact_route_is_refused(config, device, dtype, reason):
    with pytest.raises(ModelError, match=reason):
        check_exact(config, device, dtype)


def test_a_plain_model_on_a_gpu_is_accepted_and_changes_nothing_here():
    check_exact(Qwen3Config(), CUDA, torch.bfloat16)
    assert not is_exact()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"temperature": 0.7}}, "model.temperature=0.7, but needs 1"),
        ({"model": {"top_p": 0.9}}, "model.top_p, top_k or min_p"),
        ({"engine": {"cuda_decode": "eager"}}, "engine.cuda_decode=eager"),
        ({"engine": {"weight_format": "fp8"}}, "engine.weight_format=fp8"),
        ({"engine": {"max_num_seqs": 1}}, "engine.max_num_seqs=1"),
        ({"engine": {"cuda_decode": "graphs"}}, "engine.cuda_decode=graphs"),
        ({"trainer": {"has_compiled_layers": False}}, "trainer.has_compiled_layers=false"),
    ],
)
def test_settings_without_an_exact_route_are_refused(settings, message):
    sections = {"model": {"path": "m", "numerics": "exact"} | settings.pop("model", {})} | settings
    with pytest.raises(ValueError, match=f"model.numerics=exact does not work with {message}"):
        RunConfig(workflow="w:f", judge="j:f", train_dataset={"path": "t"}, **sections)
