"""The setting of torch's allocator: set unless the user has set it, understood by torch, effective on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tunesmith.model.load import SETTING, VARIABLES, round_allocations

PROGRAM = """
import torch
from tunesmith.model.load import resolve_device
resolve_device("cuda")
tensor = torch.empty(530 * 2**20, dtype=torch.uint8, device="cuda")
stats = torch.cuda.memory_stats()
print(stats["requested_bytes.all.current"] >> 20, stats["allocated_bytes.all.current"] >> 20)
"""


def test_sizes_are_rounded_unless_the_allocator_has_settings() -> None:
    environment: dict[str, str] = {}
    round_allocations(environment)
    assert environment == {VARIABLES[0]: SETTING}
    for name in VARIABLES:
        environment = {name: "max_split_size_mb:512"}
        round_allocations(environment)
        assert environment == {name: "max_split_size_mb:512"}


def test_torch_reads_the_setting() -> None:
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings") or torch.cuda.is_available():
        pytest.skip("would change the allocator of this process")
    with pytest.raises((RuntimeError, ValueError), match="power of 2"):
        torch._C._accelerator_setAllocatorSettings(SETTING.replace(":16,", ":15,"))
    torch._C._accelerator_setAllocatorSettings(SETTING)


@pytest.mark.gpu
def test_a_large_tensor_takes_a_rounded_block() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["530", "544"]
