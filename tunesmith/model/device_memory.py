"""How torch's allocator rounds the sizes of large tensors on a GPU.

Rows of samples have other lengths in every step, so their activations have other sizes. The allocator gives a tensor a
block that it has kept only if the block is large enough; for a row a little longer than all before it asks the driver
for new memory, which can take tenths of a second, and on several ranks all wait for the one. Sizes that are rounded up
fit the blocks of earlier steps.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Read by torch when memory of a GPU is first allocated."""
ROUNDED_MIB = tuple(2**power for power in range(4, 11))
"""Tensors from the first of these to twice the last are rounded: activations, and seldom weights."""
DIVISIONS = 16
"""Sizes between two powers of two; a tensor takes at most a 16th more."""
SETTING = f"roundup_power2_divisions:[8:1,{','.join(f'{size}:{DIVISIONS}' for size in ROUNDED_MIB)},>:1]"


def round_allocations(environment: MutableMapping[str, str] | None = None) -> None:
    """Let torch's allocator round large sizes, unless the environment has settings for it."""
    variables = os.environ if environment is None else environment
    if not any(variables.get(name) for name in VARIABLES):
        variables[VARIABLES[0]] = SETTING
