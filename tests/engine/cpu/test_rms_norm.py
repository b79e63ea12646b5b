"""Norms give the same output while installed, follow replaced weights, and unlike modules are left as they are."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tunesmith.engine.cpu.layers import find_rms_norms, list_norm_forwards
from tunesmith.model.torch_modes import replaced


class ShiftedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + hidden_states


def test_installed_norms_agree_with_the_modelling_code_and_are_restored() -> None:
    layer = LlamaRMSNorm(48, eps=1e-3)
    norms = find_rms_norms(layer)
    layer.weight = nn.Parameter(torch.rand(48))
    inputs = torch.randn(3, 5, 48)
    with torch.inference_mode(), replaced(list_norm_forwards(norms)):
        assert "forward" in layer.__dict__
        output = layer(inputs)
    assert "forward" not in layer.__dict__
    torch.testing.assert_close(output, layer(inputs).detach(), atol=1e-6, rtol=1e-6)


def test_other_norms_are_left_as_they_are() -> None:
    model = nn.Sequential(GemmaRMSNorm(16), ShiftedRMSNorm(16), LlamaRMSNorm(16).bfloat16(), nn.RMSNorm(16))
    with replaced(list_norm_forwards(find_rms_norms(model))):
        assert all("forward" not in layer.__dict__ for layer in model)
