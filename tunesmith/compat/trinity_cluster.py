"""Trinity-RFT's hosts, GPUs and engines as ranks: each rank samples and trains on a GPU of its own.

Several hosts are a run under Ray, one host is one under torchrun.
"""

from __future__ import annotations

from tunesmith.compat.trinity_draft import Draft
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError

KEYS = (
    "ray_namespace",
    "cluster.node_num",
    "cluster.gpu_per_node",
    "cluster.ray_address",
)
"""Keys of the file that `resolve_cluster` reads, besides those of the rollout model."""
ENGINES = "explorer.rollout_model.engine_num"
TENSOR_PARALLEL_SIZE = "explorer.rollout_model.tensor_parallel_size"


def resolve_cluster(draft: Draft) -> None:
    """Set the `cluster` section from the hosts, their GPUs, the engines and the settings of Ray."""
    num_hosts, num_ranks = max(draft.find("cluster.node_num", 1), 1), count_ranks(draft)
    if draft.find(TENSOR_PARALLEL_SIZE, 1) > 1:
        num_ranks = split_model(draft)
    batch_size = draft.find("buffer.batch_size", AlgorithmSection().batch_size)
    if num_ranks > batch_size:
        draft.notes.append(
            f"buffer.batch_size={batch_size}: a task runs on one GPU, so {batch_size} of {num_ranks} GPUs are used"
        )
        num_ranks = batch_size
    if num_ranks > 1:
        draft.set("cluster.num_workers", num_ranks, source="cluster.gpu_per_node")
    if num_hosts > 1:
        draft.set("cluster.launcher", "ray", source="cluster.node_num")
    address = draft.find("cluster.ray_address")
    if address not in (None, "", "auto"):
        raise ConfigError(
            f"cluster.ray_address={address!r} is not supported: a run joins the Ray cluster of its host, or the one "
            "in the environment variable RAY_ADDRESS; set the variable"
        )
    namespace = draft.find("ray_namespace")
    if namespace and num_hosts == 1:
        raise ConfigError(
            f"ray_namespace={namespace!r} is not supported on one host, where runs start without Ray: remove it, or "
            "give the hosts of a Ray cluster as cluster.node_num"
        )
    if namespace:
        draft.set("cluster.ray_namespace", namespace, source="ray_namespace")
    note_engines(draft, num_ranks)


def count_ranks(draft: Draft) -> int:
    """GPUs of all hosts; without them, the engines, because each rank has one."""
    num_hosts, num_gpus = max(draft.find("cluster.node_num", 1), 1), draft.find("cluster.gpu_per_node")
    if num_gpus:
        return int(num_hosts * num_gpus)
    if num_hosts > 1:
        raise ConfigError(f"cluster.node_num={num_hosts} needs cluster.gpu_per_node: a rank runs on each GPU")
    return max(int(draft.find(ENGINES, 1)), 1)


def split_model(draft: Draft) -> int:
    """Set the engine for a model that is split over GPUs, and return the number of ranks that train it.

    One vLLM samples from the model. Its decoder layers are divided over one rank for each GPU; an adapter trains on
    one rank.
    """
    size, num_engines = int(draft.find(TENSOR_PARALLEL_SIZE)), draft.find(ENGINES, 1)
    if num_engines != 1:
        draft.notes.append(
            f"{ENGINES}={num_engines} with {TENSOR_PARALLEL_SIZE}={size}: one vLLM engine over {size} GPUs samples; a "
            f"model that fits one GPU is faster with {TENSOR_PARALLEL_SIZE}=1"
        )
    num_gpus = draft.find("cluster.gpu_per_node")
    if num_gpus and num_gpus < size:
        raise ConfigError(
            f"{TENSOR_PARALLEL_SIZE}={size} is not supported with cluster.gpu_per_node={num_gpus}: a model is split "
            "over GPUs of one host; raise cluster.gpu_per_node, or lower tensor_parallel_size"
        )
    draft.set("engine.kind", "vllm", source=TENSOR_PARALLEL_SIZE)
    draft.set("engine.tensor_parallel_size", size, source=TENSOR_PARALLEL_SIZE)
    if "lora" in draft.values.get("model", {}):
        draft.notes.append(f"{TENSOR_PARALLEL_SIZE}={size}: vLLM samples on {size} GPUs, and one of them trains")
        return 1
    draft.set("cluster.has_sharded_weights", True, source=TENSOR_PARALLEL_SIZE)
    return max(count_ranks(draft), size)


def note_engines(draft: Draft, num_ranks: int) -> None:
    """Engines of their own GPUs do not exist: every rank samples."""
    num_engines = draft.find(ENGINES, 1)
    if draft.find(TENSOR_PARALLEL_SIZE, 1) > 1:
        return
    if num_engines > num_ranks:
        raise ConfigError(
            f"{ENGINES}={num_engines} is not supported on {num_ranks} GPUs: each GPU has one engine, which shares its "
            f"weights with the trainer; raise cluster.gpu_per_node, or set engine_num={num_ranks}"
        )
    if 1 < num_engines < num_ranks:
        draft.notes.append(
            f"{ENGINES}={num_engines}: all {num_ranks} GPUs sample and train, each with an engine (cluster.num_workers)"
        )
