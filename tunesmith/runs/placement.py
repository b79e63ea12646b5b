"""The settings of one rank: its device and its port, checked before weights load."""

from __future__ import annotations

import logging

from tunesmith.cluster.rank_info import RankInfo, is_ray_worker
from tunesmith.config import ModelSection, RunConfig, Section, ServeSection
from tunesmith.config.run import list_serve_conflicts
from tunesmith.errors import ConfigError

logger = logging.getLogger(__name__)


def place_config(config: RunConfig, place: RankInfo, *, num_gpus: int) -> RunConfig:
    """The config of a rank on a host with `num_gpus` GPUs; raise ConfigError if its ranks cannot run there."""
    check_workers(config, place)
    if place.world_size == 1:
        return config.model_copy(update={"cluster": config.cluster.model_copy(update={"num_workers": None})})
    changes: dict[str, Section] = {"model": place_model(config.model, place, num_gpus=num_gpus)}
    port = place_port(config.rollout.http_port, place, knob="rollout.http_port")
    changes["rollout"] = config.rollout.model_copy(update={"http_port": port})
    if config.cluster.sampling_ranks and place.rank < place.world_size - config.cluster.sampling_ranks:
        # a rank that only trains never samples: the memory of its keys and values is freed
        changes["engine"] = config.engine.model_copy(update={"kv_cache_tokens": config.model.max_model_len})
    return config.model_copy(update=changes)


def check_workers(config: RunConfig, place: RankInfo) -> None:
    """Raise unless as many ranks run as the config says, and each gets a task."""
    num_workers, num_ranks = config.cluster.num_workers, place.world_size
    found = "one process" if num_ranks == 1 else f"{num_ranks} ranks"
    if config.cluster.launcher == "ray" and not is_ray_worker():
        raise ConfigError(
            "cluster.launcher=ray starts runs of `tunesmith tune` and tune() only: leave it out here, or set torchrun"
        )
    has_own_sampler = num_ranks > 1 and not config.cluster.has_sharded_weights
    if has_own_sampler and (config.engine.tensor_parallel_size > 1 or config.engine.vllm.devices is not None):
        raise ConfigError(
            f"with {num_ranks} ranks each has a vLLM of its own on its GPU: leave out engine.tensor_parallel_size and "
            "engine.vllm.devices, start one rank, or set cluster.has_sharded_weights=true for one vLLM"
        )
    if num_workers not in (None, 1) and num_ranks == 1 and not config.cluster.has_sharded_weights:
        logger.warning(
            "cluster.num_workers=%d (AgentScope's inference_engine_num), but this run has one process, which does the "
            "work of all; `torchrun --nproc-per-node %d` starts a program on as many GPUs",
            *(num_workers, num_workers),
        )
    elif num_workers is not None and num_workers != num_ranks:
        raise ConfigError(
            f"cluster.num_workers={num_workers}, but this run has {found}: start it with `tunesmith tune RUN.yaml`, or "
            f"this program with `torchrun --nproc-per-node {num_workers}`, set cluster.launcher=ray, or leave "
            "cluster.num_workers (AgentScope's inference_engine_num) out"
        )
    if num_ranks <= config.cluster.sampling_ranks:
        raise ConfigError(
            f"cluster.sampling_ranks={config.cluster.sampling_ranks} leaves no rank that trains, since this run has "
            f"{found}: lower it, or start more with --gpus or --ranks"
        )
    if num_ranks > config.algorithm.batch_size:
        raise ConfigError(
            f"algorithm.batch_size={config.algorithm.batch_size} is smaller than the number of ranks, {num_ranks}, and "
            "a task runs on one rank: raise the batch size, or use fewer ranks"
        )


def place_model(model: ModelSection, place: RankInfo, *, num_gpus: int) -> ModelSection:
    """The model on this rank's GPU, or on the CPU."""
    is_cpu = model.device == "cpu" or (model.device == "auto" and num_gpus == 0)
    if is_cpu:
        return model.model_copy(update={"device": "cpu"})
    if model.device not in ("auto", "cuda"):
        raise ConfigError(
            f"model.device={model.device!r} with {place.world_size} ranks: each rank has a GPU of its own; set auto"
        )
    if place.local_size > num_gpus:
        raise ConfigError(
            f"{place.local_size} ranks on this host, which has {num_gpus} GPUs: start at most one rank for each GPU, "
            "or set model.device=cpu"
        )
    # imports transformers, which the launcher of ranks does not wait for
    from tunesmith.model.load import resolve_device

    return model.model_copy(update={"device": str(resolve_device(f"cuda:{place.local_rank}"))})


def place_port(port: int | None, place: RankInfo, *, knob: str) -> int | None:
    """The port of this rank, counted up from that of the first on its host; None and 0 (any free port) stay."""
    if not port:
        return port
    if port + place.local_rank > 65535:
        raise ConfigError(f"{knob}={port} leaves no port for rank {place.rank}: lower it, or set 0")
    return port + place.local_rank


def place_server(serve: ServeSection, config: RunConfig, place: RankInfo) -> ServeSection:
    """The server of this rank; raise ConfigError if its ranks cannot share the work of external programs."""
    for conflict in list_serve_conflicts(config, serve, place.world_size):
        raise ConfigError(conflict)
    if place.local_size < place.world_size:
        raise ConfigError(
            f"serve runs on ranks of one host, and {place.world_size - place.local_size} of {place.world_size} ranks "
            "run on others: start torchrun on one host only"
        )
    port = place_port(serve.port, place, knob="serve.port")
    return serve.model_copy(update={"port": port})
