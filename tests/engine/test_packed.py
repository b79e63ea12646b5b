"""Packed linear layers give what `F.linear` gives, only while installed, and only of the weights as last packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.engine.packed import PackedLinears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


@pytest.mark.parametrize("shape", [(1, 7, 256), (33, 256), (1, 256)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_agree_with_plain_ones(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(256, 300, bias=bias)
    inputs = torch.randn(shape)
    packed = PackedLinears(layer)
    packed.refresh()
    with torch.inference_mode(), packed.installed():
        output = layer(inputs)
    torch.testing.assert_close(output, layer(inputs).detach(), atol=1e-5, rtol=1e-5)


def test_new_weights_are_used_after_a_refresh_and_the_layer_is_left_as_it_was() -> None:
    layer = nn.Linear(256, 300)
    packed = PackedLinears(layer)
    packed.refresh()
    with torch.no_grad():
        layer.weight.zero_()
    inputs = torch.ones(9, 256)
    with torch.no_grad(), packed.installed():
        assert not torch.equal(layer(inputs), layer.bias.expand(9, -1))
    assert "forward" not in layer.__dict__
    assert torch.equal(layer(inputs), layer.bias.expand(9, -1))
    packed.refresh()
    with torch.no_grad(), packed.installed():
        torch.testing.assert_close(layer(inputs), layer.bias.expand(9, -1))


def test_calls_of_few_rows_multiply_the_parameters_themselves() -> None:
    layer = nn.Linear(256, 300)
    packed = PackedLinears(layer)
    packed.refresh()
    with torch.no_grad(), packed.installed():
        layer.weight.zero_()
        assert torch.equal(layer(torch.ones(2, 256)), layer.bias.expand(2, -1))


def test_small_and_reduced_precision_layers_stay_plain() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 300, dtype=torch.bfloat16))
    packed = PackedLinears(model)
    packed.refresh()
    with packed.installed():
        assert all("forward" not in layer.__dict__ for layer in model)
