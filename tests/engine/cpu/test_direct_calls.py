"""Direct calls give the same output, follow new weights and replaced forwards, run hooks, and end with `installed`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tunesmith.engine.cpu.layers import DirectCall, find_places, list_direct_calls
from tunesmith.model.torch_modes import replaced


class Block(nn.Module):
    """Reads an attribute of a layer beside calling it, as some modeling code does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = LlamaRMSNorm(8), nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(self.up(self.norm(inputs)).to(self.down.weight.dtype))


def test_installed_calls_give_the_same_output_and_are_removed() -> None:
    block, inputs = Block(), torch.randn(3, 8)
    places = find_places(block)
    block.up.weight = nn.Parameter(torch.rand(12, 8))
    with torch.no_grad(), replaced(list_direct_calls(places)):
        assert all(type(layer) is DirectCall for layer in (block.norm, block.up, block.down))
        output = block(inputs)
    assert type(block.up) is nn.Linear
    assert torch.equal(output, block(inputs))


def test_replaced_forwards_are_called() -> None:
    block, inputs = Block(), torch.randn(3, 8)
    places = find_places(block)
    block.down.__dict__["forward"] = lambda hidden: hidden + 1
    with torch.no_grad(), replaced(list_direct_calls(places)):
        assert torch.equal(block(inputs), block.up(block.norm(inputs)) + 1)
    del block.down.__dict__["forward"]
    with torch.no_grad(), replaced(list_direct_calls(places)):
        assert torch.equal(block(inputs), nn.functional.linear(block.up(block.norm(inputs)), block.down.weight))


def test_layers_with_hooks_are_called_as_modules() -> None:
    block, inputs = Block(), torch.randn(3, 8)
    block.up.register_forward_hook(lambda module, arguments, output: output * 2)
    places = find_places(block)
    with torch.no_grad(), replaced(list_direct_calls(places)):
        assert type(block.up) is nn.Linear
        output = block(inputs)
    assert torch.equal(output, block(inputs))


def test_members_of_containers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"inner": nn.Linear(4, 4)}))
    places = find_places(model)
    with replaced(list_direct_calls(places)):
        assert type(model[0]) is nn.Linear
        assert "0" not in vars(model)
        assert "inner" not in vars(model[1])
