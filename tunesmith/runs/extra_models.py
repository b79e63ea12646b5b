"""Extra models of an algorithm (reference, teacher, critic): checked before any weights are read, then loaded.

The reference is a frozen copy of the starting model, the teacher another frozen model; the critic is trained. All are
on the policy's device, in its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from tunesmith.algorithms.advantages.group import NEEDED_REWARDS
from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.config import AlgorithmSection, CriticSection, ModelSection
from tunesmith.errors import ConfigError, errors_of
from tunesmith.model.forward.logits import verify_model
from tunesmith.model.load import (
    check_model,
    check_residual_dtype,
    check_vocabulary,
    load_model,
    load_section_tokenizer,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from tunesmith.model.source.resolve import find_model
from tunesmith.model.value_model import ValueModel
from tunesmith.runs.memory import build_planned_model
from tunesmith.runs.policy import load_sharded_model
from tunesmith.trainer.sharding.sharded_model import find_decoder_layers, find_sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraModels:
    """Models of the trainer other than the policy; None if the algorithm does not need the model."""

    reference: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None
    critic: ValueModel | None = None


def check_extra_models(algorithm: Algorithm, section: AlgorithmSection, model: ModelSection) -> None:
    """Raise ConfigError for an extra model that is missing, has no effect or does not fit the policy."""
    for key, need, given in (("teacher", "teacher", section.teacher), ("expert", "experts", section.expert)):
        if need in algorithm.needs and given is None:
            raise ConfigError(f"algorithm_type={algorithm.name!r} needs algorithm.{key}.path")
        if need not in algorithm.needs and given is not None:
            raise ConfigError(f"algorithm.{key} has no effect with algorithm_type={algorithm.name!r}: remove it")
    if "reward_parts" in algorithm.needs and section.advantage_args.get("rewards") is None:
        raise ConfigError(f"algorithm_type={algorithm.name!r} needs {NEEDED_REWARDS}")
    if "values" not in algorithm.needs and section.critic != CriticSection():
        raise ConfigError(f"algorithm.critic has no effect with algorithm_type={algorithm.name!r}: remove it")
    check_reference(algorithm, model)
    others = {
        "algorithm.teacher.path": None if section.teacher is None else section.teacher.path,
        "algorithm.critic.path": section.critic.path,
    }
    for knob, path in others.items():
        if path is not None:
            check_same_vocabulary(path, model, knob=knob)


def check_reference(algorithm: Algorithm, model: ModelSection) -> None:
    """Refuse an adapter that changes its base, where the policy without it is the reference."""
    if model.lora is None or "reference" not in algorithm.needs:
        return
    adapter = find_model(model.path, model.base_path).adapter
    if adapter is not None and adapter.changes_base:
        raise ConfigError(
            f"model.path={model.path!r} is an adapter whose `bias` or `init_lora_weights` changes its base, so it "
            "cannot be the reference: export it as a whole model and start from that, or train without a reference"
        )


def check_sharded_models(algorithm: Algorithm, section: AlgorithmSection, model: ModelSection) -> None:
    """Refuse a model without decoder layers, and a critic that would be a whole copy of it on each rank."""
    dtype = resolve_dtype(model.dtype, resolve_device(model.device))
    find_decoder_layers(build_planned_model(model, dtype), dtype)
    if "values" in algorithm.needs and section.critic.path is None:
        raise ConfigError(
            f"cluster.has_sharded_weights: the critic of algorithm_type={algorithm.name!r} is not sharded, and it "
            "would be as large as the model: set algorithm.critic.path to a model that fits each GPU, or choose "
            "an algorithm without a critic"
        )


def check_same_vocabulary(path: str, model: ModelSection, *, knob: str) -> None:
    """Refuse a model with another vocabulary than the policy's, or with a shorter context."""
    own = load_section_tokenizer(model).get_vocab()
    with errors_of(knob.removesuffix(".path"), ("path",)):
        config = check_model(path, max_model_len=model.max_model_len, trust_remote_code=model.trust_remote_code)
        check_residual_dtype(model, config)
        # the chat template of the other model is not used
        tokenizer = load_tokenizer(path, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code)
        other = tokenizer.get_vocab()
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if differing:
        raise ConfigError(
            f"{knob}={path!r} and model.path={model.path!r} differ in vocabulary: {len(differing)} tokens differ, "
            f"such as {differing[0]!r}; choose a model of the same family"
        )
    num_embeddings = config.get_text_config().vocab_size
    if max(own.values()) >= num_embeddings:
        raise ConfigError(
            f"{knob}={path!r} has {num_embeddings} embeddings, but the tokenizer has ids up to {max(own.values())}"
        )


def load_extra_models(
    algorithm: Algorithm, section: AlgorithmSection, model: ModelSection, *, policy: PreTrainedModel
) -> ExtraModels:
    """Load the extra models that the algorithm needs; reference and teacher are sharded if the policy is."""
    teacher = critic = None
    if section.teacher is not None:
        teacher = load_frozen(model.with_path(section.teacher.path), policy=policy)
        check_vocabulary(teacher, load_section_tokenizer(model))
    if "values" in algorithm.needs:
        model_with_head = load_beside(model.with_path(section.critic.path or model.path), policy=policy)
        critic = ValueModel(model_with_head.get_decoder()).eval()
    reference = load_reference(model, policy=policy) if "reference" in algorithm.needs else None
    return ExtraModels(reference=reference, teacher=teacher, critic=critic)


def load_reference(model: ModelSection, *, policy: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of the starting model; with an adapter the policy itself, scored with the adapter disabled."""
    return policy if model.lora is not None else load_frozen(model, policy=policy)


def load_frozen(section: ModelSection, *, policy: PreTrainedModel) -> PreTrainedModel:
    """A model that is not trained, where the policy is and as it is sharded."""
    if (sharding := find_sharding(policy)) is not None:
        return load_sharded_model(section, sharding.ranks, is_trained=False)
    frozen = load_beside(section, policy=policy).requires_grad_(False)
    verify_model(frozen)
    return frozen


def load_beside(section: ModelSection, *, policy: PreTrainedModel) -> PreTrainedModel:
    """A model in the dtype and on the device of the policy."""
    return load_model(
        section.path,
        dtype=policy.dtype,
        device=policy.device,
        trust_remote_code=section.trust_remote_code,
        base_path=section.base_path,
        has_fp32_residual=section.residual_dtype == "float32",
    )
