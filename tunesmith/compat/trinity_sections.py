"""Rules for nested sections of a Trinity-RFT file: task sets, LoRA, operators, replay, auxiliary models, cluster.

Hosts, GPUs and engines become ranks: each rank samples and trains on a GPU of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.compat.trinity_draft import (
    ONE_AUXILIARY_ENGINE,
    Draft,
    Rule,
    accept,
    allow,
    allow_neutral,
    move,
    read_list,
    read_mapping,
    read_mappings,
    read_type,
    walk,
)
from tunesmith.config import AlgorithmSection, ModelSection, ReplaySection
from tunesmith.errors import ConfigError

ADAPTER = "agentscope_workflow_adapter_v1"
FUNCTIONS = "tunesmith.compat.trinity_rewards"
"""The module of workflows and reward functions that have Trinity-RFT's names."""
WORKFLOWS = {
    "math_workflow": "math_workflow",
    "async_math_workflow": "math_workflow",
    "math_boxed_workflow": "math_boxed_workflow",
    "async_math_boxed_workflow": "math_boxed_workflow",
    "on_policy_distill_math_workflow": "math_boxed_workflow",
}
REWARDS = ("math_reward", "math_boxed_reward", "format_reward", "countdown_reward")
DATA_JUICER = "Data-Juicer's own package (pip install 'tunesmith[data-juicer]')"
DISTILLATION = ("on_policy_distill", "jsd")
"""Algorithms whose first auxiliary model is the teacher."""
Types = tuple[str, str]
"""Workflow and reward function of a task set; empty without one."""

LORA_DEFAULTS: dict[str, Any] = {"lora_rank": 32, "lora_alpha": 32, "target_modules": "all-linear"}
"""Trinity-RFT's defaults of an adapter."""

TASKSET_KEYS: dict[str, str] = {"path": "path", "split": "split", "subset_name": "name"}
"""Key of a task set -> field of our data set section."""
SAMPLING_KEYS = {name: name for name in ("temperature", "top_p", "top_k")} | {"max_tokens": "max_response_tokens"}
"""Sampling parameter of a task set -> key of the file's model section."""


def read_taskset(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        return
    draft.values["train_dataset"] = read_one_set(draft, key, read_mapping(value, key), is_evaluation=False)


def read_tasksets(draft: Draft, key: str, value: Any) -> None:
    sets = read_mappings(value, key)
    if sets and "train_dataset" in draft.values:
        raise ConfigError(f"{key} and taskset are both set: put every set into tasksets")
    if len(sets) == 1:
        draft.values["train_dataset"] = read_one_set(draft, f"{key}[0]", sets[0], is_evaluation=False)
    elif sets:
        draft.values["train_datasets"] = name_sets(draft, key, sets, is_evaluation=False)


def read_eval_tasksets(draft: Draft, key: str, value: Any) -> None:
    if sets := read_mappings(value, key):
        draft.values["eval_datasets"] = name_sets(draft, key, sets, is_evaluation=True)


def name_sets(draft: Draft, key: str, sets: list[Mapping[str, Any]], *, is_evaluation: bool) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for number, each in enumerate(sets):
        name = str(each.get("name") or f"taskset_{number}")
        if name in named:
            raise ConfigError(f"{key}[{number}].name={name!r}: another set has the same name")
        named[name] = read_one_set(draft, f"{key}[{number}]", each, is_evaluation=is_evaluation)
    return named


def read_one_set(draft: Draft, key: str, given: Mapping[str, Any], *, is_evaluation: bool) -> dict[str, Any]:
    """A data set section; the set's sampling parameters and repeats are set in the sections that have them."""
    section: dict[str, Any] = {}

    def keep_selector(draft: Draft, key: str, value: Any) -> None:
        if "task_selector" in section:
            raise ConfigError(f"{key}: task_selector and data_selector are the same key; set one of them")
        section["task_selector"] = read_selector(draft, key, value)

    def add_field(draft: Draft, key: str, value: Any) -> None:
        if value := dict(read_mapping(value, key)):
            name = key.rpartition(".")[2]
            section.setdefault("fields", {})[name] = value
            draft.notes.append(f"{key}={value!r}: workflow and judge find it as task[{name!r}]")

    def add_format(draft: Draft, key: str, value: Any) -> None:
        workflow, reward = find_types(draft, given)
        if value and (workflow in WORKFLOWS or reward in REWARDS):
            section.setdefault("fields", {})["format"] = dict(read_mapping(value, key))
        else:
            accept("workflows and judges receive the whole row unchanged")(draft, key, value)

    no_selector = allow_neutral("an evaluation runs every task once; remove the selector")
    rules: dict[str, Rule] = {
        "name": accept(),
        "storage_type": allow("file", reason="tasks are read from files and from the hub; export the table to jsonl"),
        "repeat_times": move("evaluation.num_samples" if is_evaluation else "algorithm.group_size"),
        "rollout_args": read_evaluation_sampling if is_evaluation else read_sampling,
        "workflow_args": add_field,
        "reward_fn_args": add_field,
        "format": add_format,
        "default_workflow_type": accept(),  # read by resolve_functions, as the next
        "default_reward_fn_type": accept(),
        "task_selector": no_selector if is_evaluation else keep_selector,
        "data_selector": no_selector if is_evaluation else keep_selector,
        "enable_progress_bar": accept(),
        **{name: move(target, section=section) for name, target in TASKSET_KEYS.items()},
    }
    walk(draft, rules, given, parent=f"{key}.")
    return section


def find_types(draft: Draft, given: Mapping[str, Any]) -> Types:
    """The set's own workflow and reward function, else those of all sets."""
    parent = "buffer.explorer_input"
    workflow, reward = (
        str(given.get(name) or draft.find(f"{parent}.{name}", ""))
        for name in ("default_workflow_type", "default_reward_fn_type")
    )
    has_base = read_mapping(given.get("workflow_args"), "workflow_args").get("use_base")
    return "" if workflow == ADAPTER else f"{workflow} (use_base)" if has_base else workflow, reward


def resolve_functions(draft: Draft) -> None:
    """Set workflow and judge for types that are built in, and note all of them."""
    parent = "buffer.explorer_input"
    explorer = draft.find_mapping(parent)
    sets = [read_mapping(explorer.get("taskset"), f"{parent}.taskset")] if explorer.get("taskset") else []
    for name in ("tasksets", "eval_tasksets"):
        sets += read_mappings(explorer.get(name), f"{parent}.{name}")
    found = {find_types(draft, each): None for each in sets or [{}]}
    types = next(iter(found))
    if len(found) > 1:
        others = ", ".join(repr(name) for other in list(found)[1:] for name in other if name)
        draft.notes.append(f"{parent}: evaluations use the workflow and judge of training, not {others or 'none'}")
    workflow, reward = types
    if workflow in WORKFLOWS:
        draft.values["workflow"] = f"{FUNCTIONS}:{WORKFLOWS[workflow]}"
        draft.notes.append(
            f"default_workflow_type={workflow!r} is {draft.values['workflow']}, with a system prompt of its own unless "
            "format.system_prompt is set; another one: --workflow"
        )
    elif workflow:
        draft.notes.append(
            f"default_workflow_type={workflow!r} is not built in (built in are {', '.join(WORKFLOWS)}): give the agent "
            "as a function (--workflow module:function)"
        )
    if reward:
        draft.values["judge"] = f"{FUNCTIONS}:{reward}"
        is_ours = f"is {draft.values['judge']}; another one: --judge"
        missing = (
            f"is not built in (built in are {', '.join(REWARDS)}): give it as a function (--judge module:function)"
        )
        draft.notes.append(f"default_reward_fn_type={reward!r} {is_ours if reward in REWARDS else missing}")


def read_selector(draft: Draft, key: str, value: Any) -> dict[str, Any]:
    """Our selector section; names and arguments are the same and are checked when the selector is built."""
    section: dict[str, Any] = {}
    rules = {name: move(name, section=section) for name in ("selector_type", "seed", "feature_keys")}
    walk(draft, rules | {"kwargs": move("args", section=section)}, read_mapping(value, key), parent=f"{key}.")
    return section


def read_lora_configs(draft: Draft, key: str, value: Any) -> None:
    adapters = read_mappings(value, key)
    if len(adapters) > 1:
        raise ConfigError(f"{key}: one adapter is trained, got {len(adapters)}")
    for adapter in adapters:
        rules: dict[str, Rule] = {
            "name": accept(),
            "lora_rank": move("model.lora.r"),
            "lora_alpha": move("model.lora.alpha"),
            "target_modules": move("model.lora.target_modules"),
            "lora_dtype": allow("auto", reason="an adapter has the dtype of the activations; see model.dtype"),
            "exclude_modules": allow_neutral("list the layers that get an adapter in target_modules"),
            "path": allow_neutral("to continue training an adapter, set model_path to its folder"),
        }
        walk(draft, rules, {**LORA_DEFAULTS, **adapter}, parent=f"{key}[0].")


def read_sampling(draft: Draft, key: str, value: Any) -> None:
    """Sampling parameters of training rollouts; they override the model section."""
    for name, given in find_training_sampling(draft).items():
        draft.set(f"model.{name}", given, source=f"{key}.{name}", is_finer=True)


def find_training_sampling(draft: Draft) -> dict[str, Any]:
    """The sampling parameters of the training sets, which all have the same."""
    key = "buffer.explorer_input.taskset"
    sets = read_mappings(draft.find(f"{key}s"), f"{key}s") or [draft.find_mapping(key)]
    found = [list_sampling(f"{key}.rollout_args", each.get("rollout_args")) for each in sets]
    if any(each != found[0] for each in found):
        raise ConfigError(f"{key}s have different rollout_args, which is not supported: all sets sample as model says")
    return found[0]


def read_evaluation_sampling(draft: Draft, key: str, value: Any) -> None:
    """Sampling parameters of evaluations: a separate temperature; the others are those of training."""
    own = find_training_sampling(draft)
    for name, given in list_sampling(key, value).items():
        default = ModelSection.model_fields[name].default
        used = own.get(name, draft.find(f"model.{SAMPLING_KEYS[name]}", default))
        if name == "temperature":
            draft.set("evaluation.temperature", given, source=f"{key}.{name}")
        elif given != used:
            draft.notes.append(f"{key}.{name}={given!r} has no effect: evaluations sample as training, with {used!r}")


def list_sampling(key: str, value: Any) -> dict[str, Any]:
    """The sampling parameters that are set; a request samples one answer, with its logprobs."""
    given = {name: each for name, each in read_mapping(value, key).items() if name != "logprobs" and each is not None}
    if given.get("n") == 1:
        del given["n"]
    for name in given.keys() - SAMPLING_KEYS:
        raise ConfigError(
            f"{key}.{name} is not supported: a request samples one answer, with {', '.join(SAMPLING_KEYS)}"
        )
    return given if "top_k" not in given else given | {"top_k": max(read_type(given["top_k"], f"{key}.top_k", int), 0)}


def read_operators(draft: Draft, key: str, value: Any) -> None:
    """The chain of experience operators; names and arguments are checked when the chain is built."""
    operators = []
    taskset_format = draft.find_mapping("buffer.explorer_input.taskset.format")
    for number, given in enumerate(read_mappings(value, key)):
        unknown = [name for name in given if name not in ("name", "args")]
        if unknown or "name" not in given:
            raise ConfigError(f"{key}[{number}] must have a name and may have args, got {dict(given)}")
        args = dict(read_mapping(given.get("args"), f"{key}[{number}].args"))
        if given["name"] == "data_juicer":
            draft.notes.append(f"{key}[{number}].name='data_juicer' runs in {DATA_JUICER}")
            if "prompt_key" in taskset_format:
                args.setdefault("prompt_key", taskset_format["prompt_key"])
        operators.append({"name": given["name"], "args": args})
    draft.set("experience.operators", operators, source=key)


PIPELINE = "data_processor.task_pipeline"
TASK_OPERATORS: dict[str, tuple[str, dict[str, str]]] = {
    "text_length_filter": ("length_filter", {"min_len": "min_chars", "max_len": "max_chars"}),
    "document_deduplicator": ("deduplicate", {}),
}
"""Data-Juicer's operator -> ours, and the names of its arguments here."""
COUNTERPARTS = {
    "llm_difficulty_score_filter": "`tunesmith pass-rate`, then difficulty_score and priority_order",
    "llm_quality_score_filter": "quality_score, or an auxiliary model as judge",
}
"""What needs no Data-Juicer."""


def resolve_task_pipeline(draft: Draft) -> None:
    """Operators on the tasks before training: those with a counterpart here, else by Data-Juicer's package."""
    given = draft.find_mapping(PIPELINE)
    fields = list(read_list(given.get("target_fields"), f"{PIPELINE}.target_fields"))
    operators: list[dict[str, Any]] = []
    for number, item in enumerate(read_mappings(given.get("operators"), f"{PIPELINE}.operators")):
        key = f"{PIPELINE}.operators[{number}]"
        name, args = str(item.get("name")), dict(read_mapping(item.get("args"), f"{key}.args"))
        if name == "human_preference_annotation_mapper":
            draft.problems.append(
                f"{key}.name={name!r} is not supported: annotate the pairs first, then `tunesmith prefer`"
            )
            continue
        target, names = TASK_OPERATORS.get(name, ("", {}))
        if not target or not fields or set(args) - set(names):
            own = {"field": fields[0]} if fields else {}
            own |= {"num_proc": given["num_process"]} if given.get("num_process") else {}
            operators.append({"name": "data_juicer", "args": {"process": [{name: args}], **own}})
            instead = COUNTERPARTS.get(name, "train_dataset.operators (deduplicate, length_filter, quality_score)")
            draft.notes.append(f"{key}.name={name!r} runs in {DATA_JUICER}; without it: {instead}")
        elif target == "deduplicate":
            operators.append({"name": target, "args": {"fields": fields}})
        else:
            own = {names[arg]: value for arg, value in args.items()}
            operators += [{"name": target, "args": {"field": field, **own}} for field in fields]
    if operators:
        dataset = draft.values.setdefault("train_dataset", {})
        dataset["operators"] = operators
        draft.notes.append(
            f"{PIPELINE} is applied by train_dataset.operators when the run starts; tasks keep their order"
        )
        if inputs := read_list(given.get("inputs"), f"{PIPELINE}.inputs"):
            if len(inputs) > 1:
                raise ConfigError(f"{PIPELINE}.inputs: one data set has operators, got {len(inputs)}")
            dataset["path"] = inputs[0]
            draft.notes.append(f"{PIPELINE}.inputs[0] is the training set, instead of the pipeline's output")


def read_replay(draft: Draft, key: str, value: Any) -> None:
    """The replay buffer; only with a cool-down is experience trained again.

    Without `reuse_cooldown_time`, Trinity-RFT's buffer only orders fresh experience, and here all experience is fresh.
    With it, each step replays as many groups of earlier steps as it has new ones.
    """
    given = read_mapping(value, key)
    is_used = given.get("enable") and given.get("reuse_cooldown_time") is not None
    names = ("linear_decay", "decay_limit_randomization")
    rules = dict.fromkeys(("enable", "reuse_cooldown_time", "priority_fn", "priority_fn_args"), accept())
    if is_used:
        del rules["priority_fn_args"]
        rules["priority_fn"] = allow(*names, reason=f"use {' or '.join(names)}")
        targets = {"decay": "decay", "use_count_limit": "max_uses", "sigma": "sigma"}
        rules |= {f"priority_fn_args.{name}": move(f"experience.replay.{each}") for name, each in targets.items()}
        num_groups = draft.find("buffer.batch_size", AlgorithmSection().batch_size, kind=int)
        draft.set("experience.replay.num_groups", num_groups, source=key)
        draft.set("experience.replay.capacity", max(ReplaySection().capacity, num_groups), source=key)
    elif given.get("enable"):
        draft.notes.append(
            f"{key}.enable=True has no effect without reuse_cooldown_time: every step trains the experience that it "
            "sampled, and only that"
        )
    walk(draft, rules, given, parent=f"{key}.")


def read_auxiliary_models(draft: Draft, key: str, value: Any) -> None:
    """Auxiliary models by name, each with its own path and sampling parameters."""
    models: dict[str, Any] = {}
    for number, given in enumerate(read_mappings(value, key)):
        name = str(given.get("name") or f"auxiliary_{number}")
        if not given.get("model_path") or name in models:
            raise ConfigError(f"{key}[{number}] needs a model_path, and a name that is unique, got {dict(given)}")
        if not given.get("name"):
            draft.notes.append(f"{key}[{number}] has no name: it is auxiliary_models[{name!r}] of workflow and judge")
        models[name] = read_auxiliary(draft, f"{key}[{number}]", given)
    if models and draft.find("algorithm.algorithm_type") in DISTILLATION:
        name = next(iter(models))
        draft.set("algorithm.teacher.path", models.pop(name)["path"], source=key)
        draft.notes.append(f"{key}[0] is the teacher (algorithm.teacher), which scores tokens and is not called")
    if models:
        draft.values["auxiliary_models"] = models


def read_auxiliary(draft: Draft, key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        "model_path": "path", "max_model_len": "max_model_len", "temperature": "temperature", "top_p": "top_p",
        "max_tokens": "max_tokens", "max_response_tokens": "max_tokens", "enable_thinking": "enable_thinking",
        "tool_call_parser": "tool_call_parser", "reasoning_parser": "reasoning_parser", "base_url": "base_url",
    }  # fmt: skip
    without_effect = (
        "name", "enable_openai_api", "enable_history", "enable_auto_tool_choice", "enforce_eager",
        "enable_prefix_caching", "seed", "gpu_memory_utilization", "max_prompt_tokens", "engine_type",
    )  # fmt: skip
    section: dict[str, Any] = {}
    rules = {name: move(target, section=section) for name, target in kept.items()} | {
        **dict.fromkeys(without_effect, accept()),
        "engine_num": accept(ONE_AUXILIARY_ENGINE, silent=(1,)),
        "tensor_parallel_size": accept(f"{ONE_AUXILIARY_ENGINE}: start one for a large model", silent=(1,)),
        "dtype": allow("auto", "bfloat16", "float32", reason="the dtype of an auxiliary model is chosen by the device"),
    }
    walk(draft, rules, given, parent=f"{key}.")
    return section


CLUSTER_KEYS = ("ray_namespace", "cluster.node_num", "cluster.gpu_per_node", "cluster.ray_address")
"""Keys of the file that `resolve_cluster` reads, besides those of the rollout model."""
ENGINES = "explorer.rollout_model.engine_num"
TENSOR_PARALLEL_SIZE = "explorer.rollout_model.tensor_parallel_size"
RUNNERS = "explorer.runner_per_model"


def resolve_cluster(draft: Draft) -> None:
    """Set the `cluster` section from the hosts, their GPUs, the engines and the settings of Ray, and the number of
    workflows that run at once on a rank: the runners of all engines over the ranks that sample."""
    num_hosts = max(draft.find("cluster.node_num", 1, kind=int), 1)
    num_engines = draft.find(ENGINES, 1, kind=int)
    is_split = draft.find(TENSOR_PARALLEL_SIZE, 1, kind=int) > 1
    num_ranks = split_model(draft) if is_split else count_ranks(draft)
    batch_size = draft.find("buffer.batch_size", AlgorithmSection().batch_size, kind=int)
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
    if not is_split and 1 < num_engines != num_ranks:
        draft.notes.append(
            f"{ENGINES}={num_engines}: all {num_ranks} GPUs sample and train, each with an engine (cluster.num_workers)"
        )
    if (num_runners := draft.find(RUNNERS, kind=int)) is not None:
        num_sampling = 1 if is_split else num_ranks
        draft.set("rollout.max_concurrency", -(-num_runners * num_engines // num_sampling), source=RUNNERS)


def count_ranks(draft: Draft) -> int:
    """GPUs of all hosts; without them, the engines, because each rank has one."""
    num_hosts: int = max(draft.find("cluster.node_num", 1, kind=int), 1)
    num_gpus: int = draft.find("cluster.gpu_per_node", 0, kind=int)
    num_engines: int = draft.find(ENGINES, 1, kind=int)
    if num_gpus:
        return num_hosts * num_gpus
    if num_hosts > 1:
        raise ConfigError(f"cluster.node_num={num_hosts} needs cluster.gpu_per_node: a rank runs on each GPU")
    return max(num_engines, 1)


def split_model(draft: Draft) -> int:
    """Set the engine for a model that is split over GPUs, and return the number of ranks that train it.

    One vLLM samples from the model. Its decoder layers are divided over one rank for each GPU; an adapter trains on
    one rank.
    """
    size: int = draft.find(TENSOR_PARALLEL_SIZE, kind=int)
    num_engines = draft.find(ENGINES, 1, kind=int)
    if num_engines != 1:
        draft.notes.append(
            f"{ENGINES}={num_engines} with {TENSOR_PARALLEL_SIZE}={size}: one vLLM engine over {size} GPUs samples; a "
            f"model that fits one GPU is faster with {TENSOR_PARALLEL_SIZE}=1"
        )
    num_gpus = draft.find("cluster.gpu_per_node", kind=int)
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
