"""Packed linear layers equal `F.linear` while installed, with the weights of the last `refresh`."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

from tunesmith.engine.cpu.layers import OneDnnLinears
from tunesmith.model.torch_modes import replaced

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


@pytest.mark.parametrize("shape", [(1, 7, 256), (33, 256), (1, 256), (3, 31, 256), (1, 1000, 256), (512, 256)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_agree_with_unpacked_ones(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(256, 300, bias=bias)
    inputs = torch.randn(shape)
    linears = OneDnnLinears(layer)
    linears.refresh()
    with torch.inference_mode(), replaced(linears.list_forwards(None)):
        output = layer(inputs)
    torch.testing.assert_close(output, layer(inputs).detach(), atol=1e-5, rtol=1e-5)


def test_new_weights_are_used_after_a_refresh_and_the_layer_is_restored() -> None:
    layer = nn.Linear(256, 300)
    linears = OneDnnLinears(layer)
    linears.refresh()
    with torch.no_grad():
        layer.weight.zero_()
    inputs = torch.ones(9, 256)
    with torch.no_grad(), replaced(linears.list_forwards(None)):
        assert not torch.equal(layer(inputs), layer.bias.expand(9, -1))
    assert "forward" not in layer.__dict__
    assert torch.equal(layer(inputs), layer.bias.expand(9, -1))
    linears.refresh()
    with torch.no_grad(), replaced(linears.list_forwards(None)):
        torch.testing.assert_close(layer(inputs), layer.bias.expand(9, -1))


def test_calls_with_few_rows_use_the_parameters() -> None:
    layer = nn.Linear(256, 300)
    linears = OneDnnLinears(layer)
    linears.refresh()
    with torch.no_grad(), replaced(linears.list_forwards(None)):
        layer.weight.zero_()
        assert torch.equal(layer(torch.ones(2, 256)), layer.bias.expand(2, -1))


def test_layers_too_small_for_the_number_of_rows_use_the_parameters() -> None:
    layer = nn.Linear(256, 300)
    linears = OneDnnLinears(layer)
    linears.refresh()
    with torch.no_grad():
        layer.weight.zero_()
    with torch.no_grad(), replaced(linears.list_forwards(2)):
        assert torch.equal(layer(torch.ones(2, 256)), layer.bias.expand(2, -1))
    with torch.no_grad(), replaced(linears.list_forwards(9)):
        assert not torch.equal(layer(torch.ones(9, 256)), layer.bias.expand(9, -1))


def test_small_and_reduced_precision_layers_are_not_packed() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 300, dtype=torch.bfloat16))
    linears = OneDnnLinears(model)
    linears.refresh()
    with replaced(linears.list_forwards(None)):
        assert all("forward" not in layer.__dict__ for layer in model)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc")
def test_many_different_numbers_of_rows_use_little_memory() -> None:
    """oneDNN keeps kernels for each number of rows: 400 of them took 220 MiB."""
    layer = nn.Linear(256, 256)
    linears = OneDnnLinears(layer)
    linears.refresh()
    with torch.inference_mode(), replaced(linears.list_forwards(None)):
        layer(torch.randn(5, 256))
        before = read_malloc_mib()
        for num_rows in range(6, 406):
            layer(torch.randn(num_rows, 256))
    assert read_malloc_mib() - before < 60


class MallocInfo(ctypes.Structure):
    _fields_ = [(f"field_{index}", ctypes.c_size_t) for index in range(10)]


def read_malloc_mib() -> float:
    """Memory that malloc has allocated: `uordblks` and `hblkhd` of glibc's mallinfo2."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = MallocInfo
    info = read()
    return (info.field_7 + info.field_4) / 2**20
