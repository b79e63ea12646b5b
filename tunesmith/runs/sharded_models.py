"""Models that are sharded over the ranks of a run (`cluster.has_sharded_weights`): checked, loaded, saved, restored.

The first rank reads the weights into CPU memory, and the others build the model without weights; then each layer is
placed and sharded before the next one. Checkpoints are those of one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import AlgorithmSection, ModelSection
from tunesmith.errors import ConfigError
from tunesmith.model.checkpoint import load_model_state, load_states
from tunesmith.model.load import build_empty_model, load_model, resolve_device, resolve_dtype
from tunesmith.trainer.sharding.sharded_model import find_layers, find_sharding, load_state, shard_model
from tunesmith.trainer.trainer import Trainer


def check_sharded_models(algorithm: Algorithm, section: AlgorithmSection, model: ModelSection) -> None:
    """Refuse a model without decoder layers, and a critic that would be a whole copy of it on each rank."""
    dtype = resolve_dtype(model.dtype, resolve_device(model.device))
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "base_path": model.base_path}
    find_layers(build_empty_model(model.path, dtype=dtype, device=torch.device("meta"), **options), dtype)
    if "values" in algorithm.needs and section.critic.path is None:
        raise ConfigError(
            f"cluster.has_sharded_weights: the critic of algorithm_type={algorithm.name!r} is not sharded, and it "
            "would be as large as the model: set algorithm.critic.path to a model that fits each GPU, or choose "
            "an algorithm without a critic"
        )


def load_sharded_model(
    path: str, section: ModelSection, ranks: Ranks, *, base_path: str | None = None, is_trained: bool = True
) -> PreTrainedModel:
    """Load the model at `path`, in the dtype and on the device of the section, sharded over the ranks."""
    device = resolve_device(section.device)
    options: dict[str, Any] = {
        "dtype": resolve_dtype(section.dtype, device),
        "trust_remote_code": section.trust_remote_code,
        "base_path": base_path,
    }
    build = load_model if ranks.is_first else build_empty_model
    model = build(path, device=torch.device("cpu" if ranks.is_first else "meta"), **options)
    shard_model(model.requires_grad_(is_trained), ranks, device)
    return model


def restore_sharded(checkpoint: Path, model: PreTrainedModel, trainer: Trainer) -> dict[str, Any]:
    """Restore model and trainer on all ranks; return the state of the run.

    The first rank reads the weights. Each reads its parts of the optimizer's state from the file.
    """
    sharding = find_sharding(model)
    assert sharding is not None
    weights: dict[str, Tensor] = {}
    if sharding.ranks.is_first:
        weights = load_model_state(checkpoint, model, dtype=sharding.dtype)
    load_state(model, weights)
    restored = load_states(checkpoint, is_mapped=True)
    trainer.load_state_dict(restored.trainer_state)
    return restored.run_state
