"""Load the actors of a run: the policy and auxiliary models with their engines and endpoints, and the user's functions.

The engine and the trainer share one module; settings and files are checked before any weights are read. Of a model that
is sharded over ranks (`cluster.has_sharded_weights`) the first rank reads the weights into CPU memory, and the others
build it without weights; then each layer is placed and sharded before the next one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import openai
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.arguments import read_api_key
from tunesmith.chat.renderer import Renderer
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import AuxiliaryModelSection, EngineSection, ModelSection, RunConfig, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.vllm.engine import DistantEngine, VllmEngine, list_devices
from tunesmith.engine.vllm.support import check_installation, check_parameters
from tunesmith.engine.worker.model_runner import check_fp8_device
from tunesmith.environments.episode import OPPONENT
from tunesmith.errors import ConfigError, errors_of
from tunesmith.model.forward.logits import verify_model
from tunesmith.model.forward.recurrence import is_recurrent
from tunesmith.model.load import (
    build_empty_model,
    check_section,
    check_vocabulary,
    load_config,
    load_model,
    load_section_model,
    load_section_tokenizer,
    resolve_device,
    resolve_dtype,
)
from tunesmith.model.torch_modes import set_num_threads
from tunesmith.model.towers import find_model_class, train_all_weights
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.chat_model import Endpoint
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ExternalModel, ModelProvider, ModelService, UnrecordedModel
from tunesmith.rollout.signature import ENVIRONMENT
from tunesmith.trainer.sharding.sharded_model import iter_whole_weights, shard_model
from tunesmith.types import Distribution, Engine, JudgeType, Sampling, WorkflowType

BuildModel = Callable[[Endpoint, Mapping[str, Any]], Any]
"""Builds the `model` argument of a workflow from an endpoint and the request fields sent with every call."""
MAX_ATTEMPTS = 3
"""Of a rollout whose environment was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A local model with its engine and its endpoint."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine: LocalEngine | VllmEngine | DistantEngine
    service: ModelService

    def close(self) -> None:
        """End the engine's process, if it has one."""
        if isinstance(self.engine, VllmEngine):
            self.engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is called and never trained; `engine` is None if it is outside of this process."""

    provider: ModelProvider
    engine: Engine | None = None


WITHOUT_TOPK = ("longcat_flash", "phimoe")
"""Types of models whose routers do not choose the largest scores in their `forward`, so that no route is replayed."""


def check_trained_model(section: ModelSection, trainer: TrainerSection) -> None:
    """Like `check_section`, for a model that will be trained."""
    config = check_section(section)
    text, code = config.get_text_config(), inspect.getmodule(find_model_class(config))
    has_experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    members = {} if code is None else vars(code)  # None: code of the model's own, which may have any routers
    has_routers = has_experts and any(name.endswith("Router") for name in members)
    has_choice = has_routers and text.model_type not in WITHOUT_TOPK
    has_balance = has_experts and "load_balancing_loss_func" in members
    for knob, is_supported in {"routing_replay": has_choice, "router_aux_loss_coef": has_balance}.items():
        if getattr(trainer, knob) and not is_supported:
            raise ConfigError(f"trainer.{knob} does not support models of type {text.model_type!r}: leave it out")
    device = resolve_device(section.device)
    is_quantized = section.lora is not None and section.lora.quantization != "none"
    is_wide = resolve_dtype(section.dtype, device) == torch.float32
    if trainer.has_row_graphs and (device.type == "cpu" or is_quantized or is_wide):
        raise ConfigError("trainer.has_row_graphs needs a GPU and unquantized 16-bit weights: remove it")


def check_engine(section: EngineSection, model: ModelSection) -> None:
    """Raise if the device of the model cannot sample from the configured weights."""
    if section.weight_format == "fp8":
        check_fp8_device(resolve_device(model.device))
    if section.kind == "vllm":
        check_vllm(section, model)
    refused = {
        "engine.weight_format=fp8": section.weight_format == "fp8",
        "engine.kind=vllm": section.kind == "vllm",
        # a state cannot be taken back to before a draft that was not sampled
        f"engine.max_speculating_seqs={section.max_speculating_seqs}": section.max_speculating_seqs > 0,
    }
    if knob := next((each for each, is_set in refused.items() if is_set), None):
        config = load_config(model.path, trust_remote_code=model.trust_remote_code, base_path=model.base_path)
        if is_recurrent(config):
            raise ConfigError(
                f"{knob} does not support models of type {config.get_text_config().model_type!r}, which have recurrent "
                "layers: leave it out"
            )


def check_vllm(section: EngineSection, model: ModelSection) -> None:
    """Raise if vLLM is not installed in a version that the engine knows, or cannot run this model here."""
    check_installation(section.vllm.python)
    if model.lora is not None and model.lora.quantization != "none":
        raise ConfigError(
            f"engine.kind=vllm cannot merge an adapter into {model.lora.quantization} weights: set "
            "model.lora.quantization=none, or engine.kind=tunesmith"
        )
    try:
        check_parameters(build_sampling(model), eos_ids=())
    except ValueError as error:
        raise ConfigError(f"the model section: {error}") from None
    device, num_gpus = resolve_device(model.device), torch.cuda.device_count()
    if device.type == "cpu":
        if section.vllm.has_seeds:
            raise ConfigError("engine.vllm.has_seeds needs GPUs: vLLM's CPU build fails on requests with seeds")
        if section.vllm.devices is not None or section.tensor_parallel_size > 1:
            raise ConfigError(
                "engine.tensor_parallel_size and engine.vllm.devices choose GPUs, and model.device is the CPU: leave "
                "them out"
            )
        return
    devices = [each.index for each in list_devices(device, section) or ()]
    if max(devices) >= num_gpus:
        raise ConfigError(
            f"engine.kind=vllm would use GPUs {devices}, and this host has {num_gpus}: lower "
            "engine.tensor_parallel_size, or list others in engine.vllm.devices"
        )


def load_policy(
    section: ModelSection,
    engine_section: EngineSection,
    *,
    build_model: BuildModel,
    is_recorded: bool = True,
    sharded_over: Ranks | None = None,
    has_trainer: bool = True,
) -> Policy:
    """Load a model with its engine and endpoint; `sharded_over`: ranks that share the weights and one engine;
    `has_trainer`: whether this process trains the model."""
    tokenizer = load_section_tokenizer(section)
    if sharded_over is None:
        model = load_section_model(section)
    else:
        model = load_sharded_model(section, sharded_over)
    check_vocabulary(model, tokenizer)
    engine = build_engine(
        model,
        tokenizer,
        engine_section,
        max_model_len=section.max_model_len,
        ranks=sharded_over,
        has_trainer=has_trainer,
    )
    renderer = Renderer(
        tokenizer,
        tool_call_parser=section.tool_call_parser,
        reasoning_parser=section.reasoning_parser,
        enable_thinking=section.enable_thinking,
        split_special_tokens=section.split_special_tokens,
    )
    service = ModelService(
        engine,
        renderer,
        model_name=section.path,
        sampling=build_sampling(section),
        build_model=lambda endpoint: build_model(endpoint, {}),
        is_recorded=is_recorded,
    )
    return Policy(model=model, tokenizer=tokenizer, engine=engine, service=service)


def load_sharded_model(section: ModelSection, ranks: Ranks, *, is_trained: bool = True) -> PreTrainedModel:
    """Load a model sharded over the ranks."""
    device = resolve_device(section.device)
    options: dict[str, Any] = {
        "dtype": resolve_dtype(section.dtype, device),
        "trust_remote_code": section.trust_remote_code,
        "base_path": section.base_path,
    }
    if ranks.is_first:
        model = load_model(section.path, device=torch.device("cpu"), **options)
    else:
        model = build_empty_model(section.path, **options)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if ranks.broadcast_object(is_tied) != is_tied:  # the first one merged an adapter of the head, which unties it
        from tunesmith.model.adapters.lora import untie_head  # PEFT takes seconds to import

        untie_head(model)
    shard_model(train_all_weights(model) if is_trained else model.requires_grad_(False), ranks, device)
    return model


def build_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: EngineSection,
    *,
    max_model_len: int,
    ranks: Ranks | None,
    has_trainer: bool,
) -> LocalEngine | VllmEngine | DistantEngine:
    """The engine of this process; of several `ranks` that share a model, only the first one has vLLM."""
    if section.kind == "tunesmith":
        return LocalEngine(model, tokenizer, section, max_model_len=max_model_len, has_trainer=has_trainer)
    if ranks is None:
        verify_model(model)  # as `LocalEngine` does: the trainer computes with it
        return VllmEngine(model, tokenizer, section, max_model_len=max_model_len)
    engine: VllmEngine | DistantEngine
    if ranks.is_first:
        gather = partial(iter_whole_weights, model)
        engine = VllmEngine(model, tokenizer, section, max_model_len=max_model_len, gather=gather)
    else:
        engine = DistantEngine(model, tokenizer, max_model_len=max_model_len)
    ranks.broadcast_object()  # until vLLM has started, the memory of its GPUs does not change
    return engine


def build_sampling(section: ModelSection, *, temperature: float | None = None) -> Sampling:
    """A model's default sampling; `temperature` overrides the model's."""
    distribution = Distribution(
        temperature=section.temperature if temperature is None else temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
    )
    return Sampling(distribution=distribution, max_tokens=section.max_tokens)


def check_auxiliary(key: str, section: AuxiliaryModelSection) -> None:
    if section.base_url is None:
        with errors_of(key, AuxiliaryModelSection.model_fields):
            check_section(_to_model_section(section))
    else:
        read_api_key(section.api_key_env, knob=f"{key}.api_key_env")


def load_auxiliary(
    key: str, section: AuxiliaryModelSection, engine_section: EngineSection, *, device: str, build_model: BuildModel
) -> LoadedModel:
    """The model of the section `key`: a local one on `device`, or a client of an OpenAI-compatible server."""
    if section.base_url is None:
        local = _to_model_section(section).model_copy(update={"device": device})
        with errors_of(key, AuxiliaryModelSection.model_fields):
            policy = load_policy(local, engine_section.for_auxiliary(), build_model=build_model, is_recorded=False)
        return LoadedModel(provider=policy.service, engine=policy.engine)
    api_key = read_api_key(section.api_key_env, knob=f"{key}.api_key_env") or "EMPTY"
    endpoint = Endpoint(
        base_url=section.base_url,
        api_key=api_key,
        model_name=section.path,
        client=openai.AsyncOpenAI(base_url=section.base_url, api_key=api_key, max_retries=2),
    )
    options: dict[str, Any] = {
        "temperature": section.temperature,
        "top_p": section.top_p,
        "max_tokens": section.max_tokens,
    }
    if section.enable_thinking is not None:
        options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": section.enable_thinking}}
    return LoadedModel(provider=ExternalModel(build_model(endpoint, options)))


def _to_model_section(section: AuxiliaryModelSection) -> ModelSection:
    return ModelSection(**section.model_dump(exclude={"base_url", "api_key_env"}))


def load_actors(
    config: RunConfig,
    *,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    ranks: Ranks = Ranks(),
    has_rollouts: bool = True,
    has_trainer: bool = True,
) -> tuple[Policy, Actors]:
    """Load the models of a run; the policy and the actors share one engine and one endpoint.

    A rank that runs no rollouts loads no auxiliary models; one without a trainer keeps no memory for it.
    """
    set_num_threads(config.num_cpu_threads)
    is_sharded = config.cluster.has_sharded_weights and not ranks.is_alone
    policy = load_policy(
        config.model,
        config.engine,
        build_model=build_model,
        sharded_over=ranks if is_sharded else None,
        has_trainer=has_trainer,
    )
    own = LoadedModel(provider=policy.service, engine=policy.engine)
    actors = build_actors(
        config, own, workflow=workflow, judge=judge, build_model=build_model, has_auxiliaries=has_rollouts
    )
    return policy, actors


def build_actors(
    config: RunConfig,
    loaded: LoadedModel,
    *,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    has_auxiliaries: bool = True,
) -> Actors:
    """The actors of a run whose workflows call this model; its auxiliary models are loaded."""
    options: dict[str, Any] = {"device": config.model.device, "build_model": build_model}
    auxiliaries = {
        name: load_auxiliary(f"auxiliary_models.{name}", section, config.engine, **options)
        for name, section in config.auxiliary_models.items()
        if has_auxiliaries
    }
    sources = {name: each.provider for name, each in auxiliaries.items()}
    model, service = loaded.provider, loaded.provider if isinstance(loaded.provider, ModelService) else None
    bound = workflow.keywords.get(ENVIRONMENT) if isinstance(workflow, partial) else None
    if getattr(bound, "num_players", 1) > 1:
        sources.setdefault(OPPONENT, model if service is None else UnrecordedModel(service))
    return Actors(
        engine=loaded.engine,
        model=model,
        service=service,
        auxiliary_models=sources,
        auxiliary_engines=[each.engine for each in auxiliaries.values() if each.engine is not None],
        agent=Agent(
            workflow=workflow,
            judge=judge,
            timeout_s=config.rollout.timeout_s,
            max_attempts=MAX_ATTEMPTS if config.serve is None else config.serve.max_attempts,
        ),
        max_concurrency=config.rollout.max_concurrency,
        http_port=config.rollout.http_port,
        max_body_bytes=int(config.rollout.max_body_mib * 2**20),
    )
