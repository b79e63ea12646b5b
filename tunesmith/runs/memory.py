"""The memory of a run before it starts: what `tunesmith.model.memory` estimates, for a config and a device."""

from __future__ import annotations

import os
import textwrap

import torch
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.config import ModelSection, OfflineConfig, RunConfig
from tunesmith.model.load import build_empty_model
from tunesmith.model.memory import (
    GIB,
    GRADIENT_BYTES,
    STATE_BYTES,
    Card,
    MemorySettings,
    count_held_bytes,
    count_weight_bytes,
    estimate_memory,
    fit_rows,
)


def find_card(device: torch.device) -> Card:
    """The device's memory; on a CPU that of this host."""
    if device.type == "cuda":
        return Card(type="cuda", num_bytes=torch.cuda.get_device_properties(device).total_memory)
    return Card(type="cpu", num_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def fit_run(config: RunConfig, algorithm: Algorithm, model: PreTrainedModel) -> tuple[RunConfig, MemorySettings]:
    """The config with rows that fit the model's device, and what its memory depends on."""
    settings = fit_rows(model, collect_run_settings(config, algorithm, model), find_card(model.device))
    return config.model_copy(update={"trainer": settings.trainer}), settings


def describe_memory(model: PreTrainedModel, settings: MemorySettings) -> list[str]:
    """Lines of a run's first block: the memory that it may need, and what that is made of."""
    card = find_card(model.device)
    parts = estimate_memory(model, settings, card)
    needed = sum(parts.values())
    parts[f"activations of {settings.row_tokens:,} tokens"] = parts.pop("activations")
    listed = ", ".join(f"{name} {each / GIB:.1f}" for name, each in parts.items() if each >= 0.05 * GIB)
    if needed > card.num_bytes:
        listed += "; this may not fit: lower trainer.max_tokens_per_row, or set trainer.has_gradient_checkpointing"
    lines = [f"at most {needed / GIB:.1f} of {card.num_bytes / GIB:.0f} GiB:", *textwrap.wrap(listed, 72)]
    return [f"{'' if index else 'memory':8}{line}" for index, line in enumerate(lines)]


def fit_offline(config: OfflineConfig, model: PreTrainedModel, *, has_reference: bool) -> MemorySettings:
    """What the memory of a fine-tuning depends on, with rows that fit the model's device."""
    num_tokens = max(config.max_tokens_per_batch, config.model.max_model_len)
    settings = MemorySettings(
        trainer=config.trainer,
        lora=config.model.lora,
        engine=None,
        max_model_len=1,
        num_tokens=num_tokens,
        extra_bytes={"reference": count_weight_bytes(model, None)}
        if has_reference and config.model.lora is None
        else {},
    )
    return fit_rows(model, settings, find_card(model.device))


def collect_run_settings(config: RunConfig, algorithm: Algorithm, model: PreTrainedModel) -> MemorySettings:
    """What the memory of a training run of `model` depends on."""
    section, num_ranks = config.algorithm, config.cluster.num_workers or 1
    num_rollouts = section.batch_size * section.group_size // config.trainer.num_minibatches // num_ranks
    num_shared = num_ranks if config.cluster.has_sharded_weights else 1
    extra: dict[str, int] = {}
    if "reference" in algorithm.needs and config.model.lora is None:
        extra["reference"] = count_held_bytes(model, None, num_shared)
    if section.teacher is not None:
        teacher = build_planned_model(config.model.with_path(section.teacher.path), model.dtype)
        extra["teacher"] = count_held_bytes(teacher, None, num_shared)
    for name, auxiliary in config.auxiliary_models.items():
        if auxiliary.base_url is None:
            local = build_planned_model(ModelSection(path=auxiliary.path), model.dtype)
            extra[f"auxiliary {name}"] = count_weight_bytes(local, None)
    if "values" in algorithm.needs:
        critic = build_planned_model(config.model.with_path(section.critic.path or config.model.path), model.dtype)
        states = (STATE_BYTES + GRADIENT_BYTES) * critic.num_parameters()
        extra["critic"] = count_weight_bytes(critic, None) + states
    return MemorySettings(
        trainer=config.trainer,
        lora=config.model.lora,
        engine=config.engine,
        cluster=config.cluster,
        num_ranks=num_ranks,
        max_model_len=config.model.max_model_len,
        num_tokens=max(num_rollouts, 1) * config.model.max_model_len,
        extra_bytes=extra,
    )


def build_planned_model(section: ModelSection, dtype: torch.dtype) -> PreTrainedModel:
    """A model without its weights."""
    return build_empty_model(
        section.path, dtype=dtype, trust_remote_code=section.trust_remote_code, base_path=section.base_path
    )
