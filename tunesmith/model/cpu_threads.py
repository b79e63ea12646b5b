"""The number of threads of torch's CPU kernels."""

from __future__ import annotations

import os

import torch

from tunesmith.errors import ConfigError

MIN_LIMIT = 64
"""Allowed on any machine, so that a run file written for a larger machine works on a smaller one."""


def set_num_threads(number: int) -> None:
    """Set the number, and refuse one far above the number of CPUs, with which kernels only wait for each other."""
    num_cpus = os.cpu_count() or 1
    limit = max(num_cpus, MIN_LIMIT)
    if number > limit:
        raise ConfigError(f"num_cpu_threads={number}: this machine has {num_cpus} CPUs; set it to {limit} or less")
    torch.set_num_threads(number)
