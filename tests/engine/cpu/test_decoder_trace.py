"""A trace gives the decoder's own hidden states, and a decoder that computes anything itself has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tiny_models import CONFIGS, build_tiny
from tunesmith.engine.cpu.decoder_trace import trace_decoder
from tunesmith.model.forward.attention import CausalPlan, run_body, use_plan_attention

CPU = torch.device("cpu")


def build_model(name: str = "llama") -> PreTrainedModel:
    model = build_tiny(name)
    use_plan_attention(model)
    return model


@torch.no_grad()
def run_both(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Hidden states of two rows by the decoder and by its trace."""
    trace = trace_decoder(model)
    assert trace is not None
    ids = torch.randint(5, 90, (1, 11), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(4), torch.arange(20, 27)])[None]
    plan = CausalPlan([4, 7], CPU)
    return run_body(model, ids, positions, plan), run_body(model, ids, positions, plan, decoder=trace)


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.endswith(("_vl", "gemma4", "granite_swa"))])
def test_the_trace_gives_the_hidden_states_of_the_decoder(name: str) -> None:
    own, traced = run_both(build_model(name))
    assert torch.equal(own, traced)


def test_the_trace_runs_hooks_and_replaced_forwards() -> None:
    model = build_model()
    layer, norm = model.get_decoder().layers[1], model.get_decoder().norm
    handle = layer.register_forward_hook(lambda module, inputs, output: output * 2)
    norm.__dict__["forward"] = lambda inputs: inputs + 1
    try:
        own, traced = run_both(model)
    finally:
        handle.remove()
        del norm.__dict__["forward"]
    assert torch.equal(own, traced)
    assert not torch.equal(own, run_both(model)[0])


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_decoder_that_computes_between_its_submodules_has_no_trace(is_in_place: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self, decoder: nn.Module) -> None:
            super().__init__()
            self.embed_tokens, self.decoder = decoder.embed_tokens, decoder

        def forward(self, input_ids: Tensor, **inputs: object) -> object:
            embeddings = self.embed_tokens(input_ids)
            embeddings = embeddings.mul_(2.0) if is_in_place else embeddings * 2.0
            return self.decoder(inputs_embeds=embeddings, **inputs)

    model = build_model()
    decoder = Scaled(model.get_decoder())
    model.__dict__["get_decoder"] = lambda: decoder
    try:
        assert trace_decoder(model) is None
    finally:
        del model.__dict__["get_decoder"]
