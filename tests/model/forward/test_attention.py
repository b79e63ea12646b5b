"""Plan attention gives the same results as the model's own forward; without a plan nothing changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DogeConfig,
    ElectraConfig,
    GraniteMoeConfig,
    Lfm2Config,
    LlamaConfig,
    MiniMaxM2Config,
    ModernBertDecoderConfig,
    NemotronConfig,
    PhimoeConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tiny_models import CONFIGS, GEMMA_SIZES, RECURRENT, SIZES, build_tiny
from tunesmith.errors import ModelError
from tunesmith.model.forward.attention import CausalPlan, run_body, use_plan_attention
from tunesmith.model.forward.logits import compute_logits, verify_model

CPU = torch.device("cpu")
LENGTHS = [9, 14, 1]


def build_rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]


def run_rows(model: PreTrainedModel, rows: list[torch.Tensor]) -> torch.Tensor:
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return run_body(model, torch.cat(rows)[None], positions[None], CausalPlan([len(row) for row in rows], CPU))


def build_with_plan_attention(name: str) -> PreTrainedModel:
    model = copy.deepcopy(build_tiny(name))
    use_plan_attention(model)
    return model


@pytest.mark.parametrize("name", [*CONFIGS, *RECURRENT])
def test_concatenated_sequences_equal_separate_eager_forwards(name: str) -> None:
    rows = build_rows()
    expected = torch.cat([build_tiny(name)(input_ids=row[None]).logits[0] for row in rows])
    model = build_with_plan_attention(name)
    verify_model(model)
    torch.testing.assert_close(compute_logits(model, run_rows(model, rows)[0]), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [*CONFIGS, *RECURRENT])
def test_without_a_plan_a_padded_batch_is_unchanged(name: str) -> None:
    rows = build_rows()
    ids, mask = torch.zeros(3, 14, dtype=torch.long), torch.zeros(3, 14, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, -len(row) :] = row
        mask[index, -len(row) :] = 1
    arguments = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    eager, planned = build_tiny(name), build_with_plan_attention(name)
    assert planned.generate(**arguments).tolist() == eager.generate(**arguments).tolist()
    torch.testing.assert_close(
        planned(input_ids=ids, attention_mask=mask).logits[mask.bool()],
        eager(input_ids=ids, attention_mask=mask).logits[mask.bool()],
        atol=2e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2", "qwen3_5"])
def test_gradients_are_the_same_with_and_without_checkpointing(name: str) -> None:
    def collect_gradients(model: PreTrainedModel) -> list[torch.Tensor]:
        run_rows(model, build_rows()).pow(2).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, checkpointed = build_with_plan_attention(name).train(), build_with_plan_attention(name).train()
    checkpointed.gradient_checkpointing_enable()
    for one, other in zip(collect_gradients(plain), collect_gradients(checkpointed), strict=True):
        torch.testing.assert_close(one, other)


def test_a_plan_refuses_attention_dropout_in_training() -> None:
    model = build_with_plan_attention("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ModelError, match="attention_dropout"):
        run_rows(model, build_rows())


def test_a_model_whose_logits_cannot_be_reproduced_is_refused() -> None:
    class ScaledLlama(type(build_tiny("llama"))):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits * 1.5
            return outputs

    model = build_with_plan_attention("llama")
    model.__class__ = ScaledLlama
    with pytest.raises(ModelError, match="differ from the model's own"):
        verify_model(model)


def test_a_sliding_window_layer_that_passes_no_window_is_refused() -> None:
    model = build_with_plan_attention("gemma3")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="sliding-window layer 0 passes no window size"):
        verify_model(model)


class ConvWithoutPlans(Lfm2ShortConv):
    """Under another name the layer runs its own forward, which does not read plans."""


class ShortConvLayer(LlamaDecoderLayer):
    """Attention and a gated short convolution in one layer, which no layer type tells of."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        conv = Lfm2Config(**SIZES, layer_types=["conv"] * config.num_hidden_layers, conv_L_cache=3, conv_bias=False)
        self.conv = ConvWithoutPlans(conv, layer_idx)

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states + self.conv(self.input_layernorm(hidden_states)), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_a_state_that_crosses_packed_sequences_is_refused_at_initial_weights(dtype) -> None:
    """The leak changes the logits of these weights by less than the tolerance against the model's own."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    for index in range(len(model.model.layers)):
        model.model.layers[index] = ShortConvLayer(model.config, index)
        for weight in model.model.layers[index].conv.parameters():
            nn.init.normal_(weight, std=0.02)
    use_plan_attention(model.to(dtype).eval())
    with pytest.raises(ModelError, match="packed sequence.*keep a state"):
        verify_model(model)


@pytest.mark.parametrize("config", [Qwen3MoeConfig, MiniMaxM2Config, GraniteMoeConfig])
def test_experts_do_not_count_as_a_state(config) -> None:
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(config(**GEMMA_SIZES | experts)).eval()
    use_plan_attention(model)
    verify_model(model)


MOE_SIZES = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
UNSUPPORTED = {
    "two attentions in a layer": (DiffLlamaConfig(**SIZES), "layer 0 attends more than once in a forward"),
    "a mask of its own": (DogeConfig(**SIZES), "DogeAttention computes its own attention mask"),
    "a window only in the mask": (PhimoeConfig(**MOE_SIZES, sliding_window=8), "layer 0 passes no window size"),
    "attention of its own": (NemotronConfig(**SIZES), "does not run with plan attention"),
    "layers before the head": (ElectraConfig(**SIZES, is_decoder=True), "does not run with plan attention"),
    "a decoder under another name": (
        ModernBertDecoderConfig(**SIZES | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)),
        "does not run with plan attention",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_architecture_that_a_plan_would_compute_wrongly_is_refused(kind) -> None:
    """On the short rows of the verification their logits are the model's own up to little or nothing."""
    config, reason = UNSUPPORTED[kind]
    model = AutoModelForCausalLM.from_config(config).eval()
    use_plan_attention(model)
    with pytest.raises(ModelError, match=reason):
        verify_model(model)


def test_a_window_of_the_whole_context_needs_no_layer_that_passes_it() -> None:
    model = AutoModelForCausalLM.from_config(PhimoeConfig(**MOE_SIZES, sliding_window=256)).eval()
    use_plan_attention(model)
    verify_model(model)


def test_verification_keeps_the_training_mode() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": 1}))
    use_plan_attention(model)
    model.train()
    verify_model(model)
    assert model.training
