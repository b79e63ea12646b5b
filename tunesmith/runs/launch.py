"""Start a run on several ranks: of this host, or as a job of a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch

from tunesmith.cluster.launch import launch_ranks
from tunesmith.cluster.rank_info import RankInfo
from tunesmith.cluster.ray_launch import RayLaunch, launch_on_ray
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.placement import place_config
from tunesmith.runs.run_folder import describe_interruption, resolve_run_root
from tunesmith.runs.workspace import iter_numbered

T = TypeVar("T")


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


def tune_on_ray(config: RunConfig, paths: Sequence[str], tune: Callable[[RunConfig], T]) -> T:
    """Run `tune` with the config on every rank; `paths` that exist here are needed on every host."""
    named, num_workers = name_run(config), config.cluster.num_workers
    assert num_workers is not None, "cluster.launcher=ray was checked to have num_workers"
    launch = RayLaunch(
        num_workers=num_workers,
        max_restarts=config.cluster.num_restarts,
        namespace=config.cluster.ray_namespace,
        device=config.model.device,
        root=Path(config.checkpoint_root_dir).expanduser().absolute(),
        paths=[str(Path(path).expanduser().absolute()) for path in paths if Path(path).expanduser().exists()],
    )
    try:
        return launch_on_ray(launch, partial(run_attempt, named, tune))
    except (KeyboardInterrupt, SystemExit):
        print(describe_interruption(config, resolve_run_root(named)), file=sys.stderr, flush=True)
        raise


def run_attempt(config: RunConfig, tune: Callable[[RunConfig], T], is_restart: bool) -> T:
    """Train as one rank; a restart resumes whatever the attempt before it has saved."""
    if is_restart:
        config = config.model_copy(update={"continue_from_checkpoint": True, "resume_from_step": None})
    return tune(config)


def name_run(config: RunConfig) -> RunConfig:
    """The config with a name, which all attempts share."""
    if config.name is not None:
        return config
    root = next(each for each in iter_numbered(resolve_run_root(config)) if not each.exists())
    return config.model_copy(update={"name": root.name})
