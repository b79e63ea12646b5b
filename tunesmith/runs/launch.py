"""Start `tunesmith tune` or `tunesmith serve` on several ranks of this host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from tunesmith.cluster.launch import launch_ranks
from tunesmith.cluster.rank_info import RankInfo
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.placement import place_config


def launch_tuning(
    config: RunConfig,
    path: str,
    overrides: Sequence[str],
    *,
    has_gpus: bool,
    is_debug: bool,
    command: Literal["tune", "serve"] = "tune",
) -> None:
    """Run the file at `path` with the overrides on `cluster.num_workers` ranks; each reads the file again.

    `has_gpus`: the user asked for GPUs, so CPU processes will not do.
    """
    num_ranks = config.cluster.num_workers or 1
    num_gpus = torch.cuda.device_count()
    if has_gpus and num_gpus < num_ranks:
        raise ConfigError(
            f"--gpus {num_ranks}: this host has {num_gpus} GPUs; use at most that many, or --ranks {num_ranks} for "
            "CPU processes"
        )
    place_config(config, RankInfo(world_size=num_ranks, local_size=num_ranks), num_gpus=num_gpus)
    arguments = [command, path, *(part for override in overrides for part in ("--set", override))]
    launch_ranks(num_ranks, [*arguments, *(["--debug"] if is_debug else [])])
