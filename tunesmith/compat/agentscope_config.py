"""AgentScope's tuner configuration classes, with its names, fields and defaults, translated to a `RunConfig`.

Only fields that the caller set override a run file; defaults do not. An unsupported field is an error; AgentScope drops
some fields silently (temperature, top_p, enable_thinking).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tunesmith.compat.trinity_draft import ONE_AUXILIARY_ENGINE
from tunesmith.errors import ConfigError
from tunesmith.tasks.load import load_rows

logger = logging.getLogger(__name__)

MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")


class StrictModel(BaseModel):
    """Refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class TinkerConfig(StrictModel):
    """A LoRA adapter, with the fields that AgentScope passes to the Tinker service; it is trained in this process."""

    rank: int = Field(default=16, ge=1)
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None

    def get_config(self) -> dict[str, Any]:
        return self.model_dump()


def translate_adapter(adapter: TinkerConfig) -> dict[str, Any]:
    """Fields of our `model.lora` section. The head is not adapted, whatever `train_unembed` says."""
    key = "model.tinker_config"
    if adapter.base_url is not None:
        raise ConfigError(f"{key}.base_url={adapter.base_url!r} is not supported: the adapter trains in this process")
    if not (adapter.train_attn or adapter.train_mlp):
        raise ConfigError(f"{key} must have train_attn or train_mlp: the head alone cannot be adapted")
    if adapter.train_unembed and "train_unembed" in adapter.model_fields_set:
        logger.warning("%s.train_unembed has no effect: an adapter does not change the head", key)
    layers: Any = "all-linear" if adapter.train_attn else MLP_LAYERS
    section = {"r": adapter.rank, "target_modules": layers if adapter.train_mlp else "attention"}
    return section if adapter.seed is None else section | {"seed": adapter.seed}


LENGTHS = {"total_epochs", "total_steps"}
"""Fields of a training set that set the length of the run."""


class TaskSelectorConfig(StrictModel):
    """The task selector of a training set; `kwargs` are the selector's arguments."""

    selector_type: str = "sequential"
    seed: int = Field(default=42, ge=0)
    feature_keys: list[str] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class DatasetConfig(StrictModel):
    """A data set of tasks: a folder, a file or a hub id.

    `task_selector` is a TaskSelectorConfig or a dict of its fields, a name or dotted path, a custom selector object, or
    a class or function that builds one from the tasks. `weight` is the set's share if there are several.
    """

    path: str
    name: str | None = None
    split: str | None = "train"
    total_epochs: int = Field(default=1, ge=1)
    total_steps: int | None = Field(default=None, ge=1)
    task_selector: Any = None
    weight: float | None = Field(default=None, gt=0)

    @field_validator("name", "split", mode="before")
    @classmethod
    def _read_empty(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("task_selector")
    @classmethod
    def _read_selector(cls, value: Any) -> Any:
        if isinstance(value, str):
            return TaskSelectorConfig(selector_type=value)
        return TaskSelectorConfig.model_validate(value) if isinstance(value, Mapping) else value

    def preview(self, n: int = 5) -> list[dict[str, Any]]:
        """Print and return the first n rows; raises `DataError` if the path or split does not exist."""
        rows = load_rows(self.path, name=self.name, split=self.split, num_rows=n)
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return rows


class TunerModelConfig(StrictModel):
    """The trained model or an auxiliary model, and its sampling parameters."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str
    max_model_len: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 8192
    enable_thinking: bool | None = None
    tensor_parallel_size: int = Field(default=1, ge=1)
    inference_engine_num: int = Field(default=1, ge=1)
    tool_call_parser: str | None = "hermes"
    reasoning_parser: str | None = "deepseek_r1"
    tinker_config: TinkerConfig | None = None
    """Train a LoRA adapter instead of all weights."""
    base_url: str | None = None
    """For a model that is not trained: URL of an OpenAI-compatible server, on which `model_path` is its name."""
    api_key_env: str | None = None
    """Environment variable with the server's API key."""

    def get_config(self) -> dict[str, Any]:
        """The settings of the inference engine, by the keys of AgentScope's `get_config`."""
        return {
            "model_path": self.model_path,
            "max_model_len": self.max_model_len,
            "tensor_parallel_size": self.tensor_parallel_size,
            "engine_num": self.inference_engine_num,
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "enable_openai_api": True,
            "enable_auto_tool_choice": True,
        }


class AlgorithmConfig(StrictModel):
    """The algorithm, its batch sizes and the intervals of checkpoints and evaluations."""

    algorithm_type: str = "multi_step_grpo"
    learning_rate: float = 1e-6
    group_size: int = 8
    batch_size: int = 32
    save_interval_steps: int = 100
    eval_interval_steps: int = 100


def translate_model(model: TunerModelConfig) -> dict[str, Any]:
    """Fields of our `model` section; fields that the caller did not set are omitted."""
    for key in ("base_url", "api_key_env"):
        if getattr(model, key) is not None:
            raise ConfigError(
                f"model.{key}={getattr(model, key)!r} is not supported: the trained model runs in this process; set "
                f"{key} of a model in auxiliary_models"
            )
    section = translate_model_fields(model)
    return section if model.tinker_config is None else section | {"lora": translate_adapter(model.tinker_config)}


def translate_auxiliary_model(name: str, model: TunerModelConfig) -> dict[str, Any]:
    """As `translate_model`, for an auxiliary model, in this process or on a server."""
    if model.tinker_config is not None:
        raise ConfigError(f"auxiliary_models.{name}.tinker_config has no effect: auxiliary models are not trained")
    for key in ("inference_engine_num", "tensor_parallel_size"):
        if (number := getattr(model, key)) != 1:
            logger.warning("auxiliary_models.%s.%s=%d has no effect: %s", name, key, number, ONE_AUXILIARY_ENGINE)
    return translate_model_fields(model)


def translate_engines(model: TunerModelConfig) -> dict[str, Any]:
    """Our sections `cluster` and `engine` for the GPUs of the trained model.

    A model that is split over GPUs is sampled by one vLLM. Its decoder layers are divided over as many ranks for
    training; an adapter trains on one.
    """
    num_gpus = model.tensor_parallel_size
    if num_gpus == 1:
        is_set = "inference_engine_num" in model.model_fields_set
        return {"cluster": {"num_workers": model.inference_engine_num}} if is_set else {}
    if (number := model.inference_engine_num) != 1:
        logger.warning("inference_engine_num=%d has no effect: one vLLM over %d GPUs samples", number, num_gpus)
    engine = {"kind": "vllm", "tensor_parallel_size": num_gpus}
    if model.tinker_config is not None:
        return {"engine": engine}
    return {"engine": engine, "cluster": {"num_workers": num_gpus, "has_sharded_weights": True}}


def translate_model_fields(model: TunerModelConfig) -> dict[str, Any]:
    elsewhere = {"tinker_config", "tensor_parallel_size", "inference_engine_num"}
    given = model.model_dump(include=model.model_fields_set - elsewhere)
    given["path"] = given.pop("model_path")
    return given | {key: "none" for key in ("tool_call_parser", "reasoning_parser") if given.get(key, "") is None}


def translate_dataset(dataset: DatasetConfig) -> dict[str, Any]:
    """Fields of our data set section; a selector that is an object is recorded by its dotted path."""
    given = dataset.model_dump(include=dataset.model_fields_set & {"path", "name", "split", "weight"})
    selector = dataset.task_selector
    if isinstance(selector, TaskSelectorConfig):
        section = selector.model_dump(exclude_unset=True) | {"selector_type": selector.selector_type}
        if "kwargs" in section:
            section["args"] = section.pop("kwargs")
        given["task_selector"] = section
    elif selector is not None:
        kind = selector if hasattr(selector, "__qualname__") else type(selector)
        given["task_selector"] = {"selector_type": f"{kind.__module__}:{kind.__qualname__}"}
    return given


def translate_training_sets(datasets: DatasetConfig | Mapping[str, DatasetConfig]) -> dict[str, Any]:
    """One set, or several by name, replacing those of the file; several sets must agree on the length of the run."""
    given = [datasets] if isinstance(datasets, DatasetConfig) else list(datasets.values())
    lengths: dict[str, Any] = {}
    for key in sorted(LENGTHS):  # epochs first: they reset the steps of the file
        values = {getattr(each, key) for each in given if key in each.model_fields_set}
        if len(values) > 1:
            raise ConfigError(f"the training sets have different {key}: {sorted(map(str, values))}; set it once")
        if values:
            lengths |= {"total_steps": None, key: values.pop()}
    if isinstance(datasets, DatasetConfig):
        return {"train_dataset": translate_dataset(datasets), "train_datasets": {}} | lengths
    named = {name: translate_dataset(dataset) for name, dataset in datasets.items()}
    return {"train_dataset": None, "train_datasets": named} | lengths


def collect_own_selectors(datasets: DatasetConfig | Mapping[str, DatasetConfig] | None) -> dict[str, Any]:
    """Selectors that were passed as objects, by the name of their training set."""
    if datasets is None:
        return {}
    named = {"train": datasets} if isinstance(datasets, DatasetConfig) else datasets
    given = {name: each.task_selector for name, each in named.items()}
    return {name: each for name, each in given.items() if not isinstance(each, TaskSelectorConfig | None)}


def translate_held_out_sets(datasets: DatasetConfig | Mapping[str, DatasetConfig]) -> dict[str, Any]:
    """Held-out sets by name; they must not set the length of the run."""
    named = datasets if isinstance(datasets, Mapping) else {"eval_taskset": datasets}
    for name, dataset in named.items():
        if given := sorted(LENGTHS & dataset.model_fields_set):
            raise ConfigError(
                f"{given[0]} of the held-out set {name!r} has no effect: evaluations run every task once, or the first "
                "evaluation.max_tasks tasks"
            )
    return {name: translate_dataset(dataset) for name, dataset in named.items()}


def check_type(given: Any, kind: type, *, knob: str, is_one: bool = True, is_named: bool = True) -> None:
    """Refuse anything but an object of the kind (`is_one`), or a mapping of names to such objects (`is_named`)."""
    has_names = isinstance(given, Mapping)
    objects = given.values() if has_names else [given]
    if not (is_named if has_names else is_one) or not all(isinstance(each, kind) for each in objects):
        forms = [f"of type {kind.__name__}"] * is_one + [f"a mapping of names to {kind.__name__}s"] * is_named
        raise ConfigError(f"{knob} must be {', or '.join(forms)}, got {given!r}")


def translate_algorithm(algorithm: AlgorithmConfig) -> dict[str, Any]:
    given = algorithm.model_dump(include=algorithm.model_fields_set)
    elsewhere = {"learning_rate": ("trainer", "learning_rate"), "eval_interval_steps": ("evaluation", "interval_steps")}
    overrides: dict[str, Any] = {
        section: {key: given.pop(name)} for name, (section, key) in elsewhere.items() if name in given
    }
    if "save_interval_steps" in given:
        overrides["save_interval_steps"] = given.pop("save_interval_steps")
    return overrides | ({"algorithm": given} if given else {})


def translate_tune_arguments(
    *,
    train_dataset: DatasetConfig | Mapping[str, DatasetConfig] | None,
    eval_dataset: DatasetConfig | Mapping[str, DatasetConfig] | None,
    model: TunerModelConfig | None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None,
    algorithm: AlgorithmConfig | None,
    project_name: str | None,
    experiment_name: str | None,
    monitor_type: str | None,
) -> dict[str, Any]:
    """Nested overrides of a run file, from the arguments of AgentScope's `tune`."""
    overrides: dict[str, Any] = {}
    if algorithm is not None:
        check_type(algorithm, AlgorithmConfig, knob="algorithm", is_named=False)
        overrides |= translate_algorithm(algorithm)
    if train_dataset is not None:
        check_type(train_dataset, DatasetConfig, knob="train_dataset")
        overrides |= translate_training_sets(train_dataset)
    if eval_dataset is not None:
        check_type(eval_dataset, DatasetConfig, knob="eval_dataset")
        overrides["eval_datasets"] = translate_held_out_sets(eval_dataset)
    if model is not None:
        check_type(model, TunerModelConfig, knob="model", is_named=False)
        overrides |= {"model": translate_model(model)} | translate_engines(model)
    if auxiliary_models not in (None, {}):
        check_type(auxiliary_models, TunerModelConfig, knob="auxiliary_models", is_one=False)
        overrides["auxiliary_models"] = {
            name: translate_auxiliary_model(name, each) for name, each in auxiliary_models.items()
        }
    monitor = None if monitor_type is None else {"trackers": [monitor_type]}
    named = {"project": project_name, "name": experiment_name, "monitor": monitor}
    return overrides | {key: value for key, value in named.items() if value is not None}


class PromptTuneConfig(StrictModel):
    """The optimizer of a system prompt: the model that proposes prompts, the effort, and the evaluation."""

    lm_model_name: str = "dashscope/qwen-plus"
    """Model that proposes prompts, by LiteLLM's name; ignored if `tune_prompt` has a `prompt_model`."""
    optimization_level: Literal["light", "medium", "heavy"] | None = "light"
    """Number of prompts, trials and tasks, as MIPROv2's `auto`; None: `num_candidates` and `num_trials`."""
    eval_display_progress: bool = True
    """Print a line for each evaluated prompt."""
    eval_display_table: int = Field(default=5, ge=0)
    """Number of held-out tasks that are printed with their rewards under both prompts."""
    eval_num_threads: int = Field(default=16, ge=1)
    """Number of workflows that run at once."""
    compare_performance: bool = True
    """Also evaluate the initial prompt on the held-out set."""
    lm_base_url: str | None = None
    """URL of an OpenAI-compatible server that has `lm_model_name`, whose name is then that on the server."""
    lm_api_key_env: str | None = None
    """Environment variable with the server's API key."""
    num_candidates: int | None = Field(default=None, ge=3)
    """Number of proposed prompts, if `optimization_level` is None."""
    num_trials: int | None = Field(default=None, ge=1)
    """Number of evaluated choices among the proposed prompts, if `optimization_level` is None."""
    seed: int = Field(default=9, ge=1)
    """Seed of the optimizer, of local models and of the bootstrap; 9 is MIPROv2's default."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of a workflow and its judge."""
    max_failure_rate: float = Field(default=0.2, ge=0, lt=1)
    """A prompt with more failed workflows than this is not chosen; for the initial prompt they are an error."""

    @model_validator(mode="after")
    def _check_effort(self) -> Self:
        given = [self.num_candidates, self.num_trials]
        if self.optimization_level is None and None in given:
            raise ConfigError("optimization_level=None needs num_candidates and num_trials")
        if self.optimization_level is not None and given != [None, None]:
            raise ConfigError(
                f"num_candidates and num_trials have no effect with optimization_level={self.optimization_level!r}: "
                "set it to None"
            )
        return self

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.lm_base_url is None and self.lm_api_key_env is not None:
            raise ConfigError("lm_api_key_env has no effect without lm_base_url: LiteLLM reads the provider's variable")
        return self
