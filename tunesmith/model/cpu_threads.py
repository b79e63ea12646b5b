"""How many threads torch's CPU kernels use."""

from __future__ import annotations

import os

import torch

from tunesmith.errors import ConfigError

USUAL_LIMIT = 64
"""Allowed on any machine, so that a file of a larger one works on a smaller one."""


def set_num_threads(number: int) -> None:
    """Refuse so many that the kernels would only wait for each other."""
    num_cpus = os.cpu_count() or 1
    limit = max(num_cpus, USUAL_LIMIT)
    if number > limit:
        raise ConfigError(f"num_cpu_threads={number}: this machine has {num_cpus} CPUs; set it to {limit} or less")
    torch.set_num_threads(number)
