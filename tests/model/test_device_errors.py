"""What a failure on the device says."""

from __future__ import annotations

import torch

from tunesmith.model.device_errors import explain_failure, is_device_failure


def test_a_lost_device_says_how_to_go_on() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
    lost = explain_failure(error, work="a step", advice="lower it")
    assert is_device_failure(error)
    assert "illegal memory access" in lost
    assert "last checkpoint" in lost
    assert "more" not in lost


def test_too_little_memory_says_what_needs_less() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert is_device_failure(error)
    assert explain_failure(error, work="an update", advice="lower it").endswith("lower it")


def test_other_errors_are_named_as_they_are() -> None:
    assert not is_device_failure(KeyError("x"))
    assert explain_failure(KeyError("x"), work="a step", advice="") == "a step failed: KeyError: 'x'"
