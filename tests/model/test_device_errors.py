"""Messages of device errors."""

from __future__ import annotations

import pytest
import torch

from tunesmith.model.device_errors import explain_device_error, is_device_error


def test_a_lost_device_error_states_how_to_resume() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
    lost = explain_device_error(error, work="a step", advice="lower it")
    assert is_device_error(error)
    assert "illegal memory access" in lost
    assert "last checkpoint" in lost
    assert "more" not in lost


def test_out_of_memory_ends_with_the_advice() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert is_device_error(error)
    assert explain_device_error(error, work="an update", advice="lower it").endswith("lower it")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 260. MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    ],
)
def test_a_host_out_of_memory_gets_the_advice_too(error) -> None:
    assert is_device_error(error)
    assert explain_device_error(error, work="an update", advice="lower it").endswith("lower it")


def test_other_errors_have_no_advice() -> None:
    assert not is_device_error(KeyError("x"))
    assert explain_device_error(KeyError("x"), work="a step", advice="") == "a step failed: KeyError: 'x'"
