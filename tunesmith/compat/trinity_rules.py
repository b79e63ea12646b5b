"""The rules of a Trinity-RFT file: what each of its keys sets, or why it is accepted without effect or refused.

`RULES` has one rule per key. Rules of algorithms and of nested sections are in `trinity_algorithms` and
`trinity_sections`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.compat.agentscope_config import TinkerConfig, translate_adapter
from tunesmith.compat.trinity_algorithms import (
    move_for_critic,
    read_advantage_args,
    read_algorithm,
    read_auxiliary_buffers,
    read_correction,
    read_entropy_name,
    read_kl_args,
    read_kl_name,
    read_loss_args,
    read_penalty_args,
    read_penalty_name,
    read_sample_strategy,
    read_sample_strategy_args,
)
from tunesmith.compat.trinity_draft import Draft, Rule, accept, allow, allow_neutral, move, read_mapping, walk
from tunesmith.compat.trinity_sections import (
    ADAPTER,
    CLUSTER_KEYS,
    read_auxiliary_models,
    read_eval_tasksets,
    read_lora_configs,
    read_operators,
    read_replay,
    read_taskset,
    read_tasksets,
)
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError

SHARED_WEIGHTS = "sampler and trainer share one set of weights, so every step samples with the newest policy"


def read_mode(draft: Draft, key: str, value: Any) -> None:
    """One process samples and trains here; files that only sample or evaluate are for other commands."""
    nearest = {
        "bench": "`tunesmith eval` evaluates the model on its sets; `tunesmith tune` would train it",
        "explore": "`tunesmith tune` samples and trains, with the keys of the run's other file too; `tunesmith "
        "pass-rate` and `tunesmith eval` only sample",
        "train": "`tunesmith tune` samples and trains, with the keys of the run's other file too",
    }
    mode = str(value).casefold()
    if mode in nearest:
        draft.notes.append(f"{key}={value!r}: {nearest[mode]}")
    elif mode not in ("both", "colocate"):
        own = "`tunesmith serve` with serve.mode=online serves the model, collects feedback and trains on it in one "
        own += "process; write a run file for it with total_steps and without tasks (docs/serve.md)"
        raise ConfigError(f"{key}={value!r} is not supported: {own if mode == 'serve' else 'use both or colocate'}")


def read_save_interval(draft: Draft, key: str, value: Any) -> None:
    if value == 0:
        raise ConfigError(f"{key}=0 is not supported: a run needs checkpoints to be resumed; remove it")
    move("save_interval_steps")(draft, key, value)


def read_prefix_caching(draft: Draft, key: str, value: Any) -> None:
    move("engine.has_prefix_cache")(draft, key, value)
    if value is False:
        draft.notes.append(
            f"{key}=False: each call of an agent computes its whole conversation again; the cache ends with a policy "
            "version, so nothing stale is read: leave the key out"
        )


def read_train_batch_size(draft: Draft, key: str, value: Any) -> None:
    """Trinity-RFT sets the number of experiences per update; here a step is split into `num_minibatches` updates."""
    defaults = AlgorithmSection()
    batch_size = draft.find("buffer.batch_size", defaults.batch_size, kind=int)
    num_runs = batch_size * draft.find("algorithm.repeat_times", defaults.group_size, kind=int)
    value = draft.find(key, 0, kind=int)
    if not value or value >= num_runs:
        if value and value > num_runs:
            draft.notes.append(
                f"{key}={value!r} exceeds the {num_runs} rollouts of a step, which all train in one update"
            )
    elif num_runs % value:
        raise ConfigError(
            f"{key}={value!r} is not supported: it must divide batch_size * repeat_times = {num_runs}; nearest is "
            "trainer.num_minibatches, the number of updates per step"
        )
    else:
        draft.set("trainer.num_minibatches", num_runs // value, source=key)


def read_warmup_ratio(draft: Draft, key: str, value: Any) -> None:
    """Warm-up as a share of all steps, used if `lr_warmup_steps` is not set."""
    if draft.find(key, 0, kind=float) and draft.find("algorithm.optimizer.lr_warmup_steps", -1, kind=int) < 0:
        draft.set("trainer.warmup_ratio", value, source=key)
        draft.notes.append(f"{key}={value!r}: the number of warm-up steps is rounded up")


def move_count(target: str) -> Rule:
    """Set our key to the number, or to 0 for a negative one, by which Trinity-RFT turns it off."""
    return lambda draft, key, value: draft.set(target, max(draft.find(key, 0, kind=int), 0), source=key)


def read_auto_tool_choice(draft: Draft, key: str, value: Any) -> None:
    if value is False:
        draft.set("model.tool_call_parser", "none", source=key, is_finer=True)


def read_tinker(draft: Draft, key: str, value: Any) -> None:
    """The adapter that Trinity-RFT trains by the Tinker service; it is trained in this process."""
    given, fields = read_mapping(value, key), dict[str, Any]()
    if not given.get("enable"):
        return
    walk(
        draft,
        {name: move(name, section=fields) for name in TinkerConfig.model_fields} | {"enable": accept()},
        given,
        parent=f"{key}.",
    )
    draft.set("model.lora", translate_adapter(TinkerConfig(**fields)), source=key)
    draft.notes.append(f"{key}.enable=True: an adapter is trained in this process, not by the Tinker service")


def read_trainer_config(draft: Draft, key: str, value: Any) -> None:
    """verl's options of the trainer: those that change the training are moved, those of memory have no effect."""
    unused: list[str] = []

    def read(parts: tuple[str, ...], found: Any) -> None:
        if isinstance(found, Mapping) and parts[-1:] not in (("megatron",), ("checkpoint",), ("fsdp_config",)):
            for name, inner in found.items():
                read((*parts, str(name)), inner)
        elif (name := ".".join(parts)) in TRAINER_CONFIG:
            TRAINER_CONFIG[name](draft, f"{key}.{name}", found)
        elif parts[-1] in MEMORY_OPTIONS:
            unused.append(name)
        else:
            draft.problems.append(f"{key}.{name}={found!r} is not supported: set the option by its own key")

    read((), dict(read_mapping(value, key)))
    if unused:
        draft.notes.append(f"{key}: options of memory and checkpoints have no effect here: {', '.join(unused)}")


def read_sync_style(draft: Draft, key: str, value: Any) -> None:
    """When the sampler gets new weights in Trinity-RFT; here every style samples with the newest policy."""
    reason = "use one of fixed, explorer_driven, trainer_driven, fully_async"
    allow(*SEQUENTIAL_STYLES, *OVERLAPPING_STYLES, reason=reason)(draft, key, value)
    if str(value).casefold() in OVERLAPPING_STYLES:
        draft.notes.append(
            f"{key}={value!r}: Trinity-RFT samples with older weights while it trains; here a step is sampled, then "
            f"trained: {SHARED_WEIGHTS}"
        )


ONE_DEVICE = (
    "a rank samples and trains on one device, with the whole weights; to use N GPUs, set cluster.num_workers=N "
    "(--gpus N), and on several hosts cluster.launcher=ray"
)
PROXY = (
    "it is for Trinity-RFT's serve mode; nearest is `tunesmith serve` with serve.mode=online, which listens on "
    "serve.host and serve.port and keeps conversations in memory"
)
MEMORY_OPTIONS = frozenset(
    {
        "megatron", "checkpoint", "fsdp_config", "strategy", "hybrid_engine", "use_remove_padding", "balance_batch",
        "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu",
        "ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu", "forward_max_token_len_per_gpu",
        "use_dynamic_bsz", "ulysses_sequence_parallel_size", "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep",
    }
)  # fmt: skip
"""Options of verl by which results do not depend on them."""
SEQUENTIAL_STYLES = ("fixed", "explorer_driven", "dynamic_by_explorer")
"""The sampler gets the newest weights before it samples, as it does here; dynamic_by_... are older names."""
OVERLAPPING_STYLES = ("trainer_driven", "dynamic_by_trainer", "fully_async")
"""The sampler continues with old weights while the trainer works."""
SHARDING = f"{ONE_DEVICE}; to save memory set trainer.has_gradient_checkpointing or trainer.max_token_len_per_gpu"

RUN_RULES: dict[str, Rule] = {
    "project": move("project"),
    "name": move("name"),
    "group": allow_neutral("a run is identified by project and name; put the group into name"),
    "checkpoint_root_dir": move("checkpoint_root_dir"),
    "mode": read_mode,
    "continue_from_checkpoint": move("continue_from_checkpoint"),
    **dict.fromkeys(CLUSTER_KEYS, accept()),  # read by resolve_cluster
    "ignore_validator_suggestions": accept(),
    "stages": allow_neutral("a file is one run; write one file per stage, each with the last checkpoint as model_path"),
    "service": accept("Data-Juicer runs in a process of the run, without a service"),
    "log": accept("the log is written to the console"),
    "monitor.monitor_type": move("monitor.trackers", lambda tracker: [tracker]),
    "monitor.monitor_args": allow_neutral("trackers have no arguments; use their environment variables"),
    "monitor.detailed_stats": accept(),
    "monitor.enable_ray_timeline": allow_neutral("`ray timeline` writes one of a run with cluster.launcher=ray"),
}
TRAINER_CONFIG: dict[str, Rule] = {
    "actor_rollout_ref.model.enable_gradient_checkpointing": move("trainer.has_gradient_checkpointing"),
    "critic.optim.lr": move_for_critic("algorithm.critic.learning_rate"),
    "critic.cliprange_value": accept("each value is trained once per step, so its clipping has no effect"),
    "algorithm.rollout_correction.bypass_mode": accept(silent=(False,)),
}
"""verl's options that have a key of ours."""
ALGORITHM_RULES: dict[str, Rule] = {
    "algorithm_type": read_algorithm,
    "repeat_times": move("algorithm.group_size"),
    "optimizer.lr": move("trainer.learning_rate"),
    "optimizer.lr_warmup_steps": move_count("trainer.warmup_steps"),
    "optimizer.lr_warmup_steps_ratio": read_warmup_ratio,
    "optimizer.min_lr_ratio": move("trainer.min_lr_ratio"),
    "optimizer.lr_scheduler_type": move("trainer.schedule"),
    "optimizer.optimizer_type": allow("adam", "adamw", reason="the optimizer is AdamW"),
    "optimizer.betas": move("trainer.betas"),
    "optimizer.weight_decay": move("trainer.weight_decay"),
    "optimizer.clip_grad": move("trainer.max_grad_norm"),
    "policy_loss_fn": read_algorithm,
    "policy_loss_fn_args": read_loss_args,
    "advantage_fn": read_algorithm,
    "advantage_fn_args": read_advantage_args,
    "kl_loss_fn": read_kl_name,
    "kl_loss_fn_args": read_kl_args,
    "kl_penalty_fn": read_penalty_name,
    "kl_penalty_fn_args": read_penalty_args,
    "entropy_loss_fn": read_entropy_name,
    "entropy_loss_fn_args.entropy_coef": move("algorithm.entropy_coef"),
    "loss_agg_mode": move("algorithm.loss_aggregation"),
    "sample_strategy": read_sample_strategy,
    "sample_strategy_args": read_sample_strategy_args,
    "bypass_old_logprobs": allow(True, reason="the old logprobs are those recorded by the sampler"),
    "rollout_correction": read_correction,
    "enable_router_replay": allow_neutral("sampler and trainer run the same module, so routes are not replayed"),
}
MODEL_RULES: dict[str, Rule] = {
    **dict.fromkeys(("max_prompt_tokens", "enable_prompt_truncation", "logprobs"), accept()),
    "model_path": move("model.path"),
    "critic_model_path": move_for_critic("algorithm.critic.path"),
    "max_model_len": move("model.max_model_len"),
    "max_response_tokens": move("model.max_tokens"),
    "min_response_tokens": allow(0, 1, reason="a minimum length of answers is not implemented"),
    "temperature": move("model.temperature"),
    "top_p": move("model.top_p"),
    "top_k": move_count("model.top_k"),
    "repetition_penalty": allow(1, 1.0, reason="the trainer cannot reproduce this distribution; see model.min_p"),
    "enable_thinking": move("model.enable_thinking"),
    "custom_chat_template": allow_neutral("save the template to a file and set chat_template_path"),
    "chat_template_path": move("model.chat_template"),
    "lora_configs": read_lora_configs,
    "rope_scaling": allow_neutral("it is read from the model's config.json; change it there"),
    "rope_theta": allow_neutral("it is read from the model's config.json; change it there"),
    "external_model": allow_neutral("the trained model is local; for others see auxiliary_models.<name>.base_url"),
    "tinker": read_tinker,
}
BUFFER_WITHOUT_EFFECT = (
    "explorer_input.default_reward_fn_type", "trainer_input.experience_buffer.name",
    "trainer_input.experience_buffer.capacity", "trainer_input.experience_buffer.max_read_timeout",
)  # fmt: skip
BUFFER_RULES: dict[str, Rule] = {
    **dict.fromkeys(BUFFER_WITHOUT_EFFECT, accept()),
    "total_epochs": move("total_epochs"),
    "total_steps": move("total_steps"),
    "batch_size": move("algorithm.batch_size"),
    "train_batch_size": read_train_batch_size,
    "explorer_input.taskset": read_taskset,
    "explorer_input.tasksets": read_tasksets,
    "explorer_input.eval_tasksets": read_eval_tasksets,
    "explorer_input.default_workflow_type": accept(),  # read by resolve_functions, as the reward function
    "explorer_input.default_eval_workflow_type": accept("evaluations use the workflow of training", silent=(ADAPTER,)),
    "trainer_input.experience_buffer.storage_type": allow("queue", reason="a step trains the rollouts it sampled"),
    "trainer_input.experience_buffer.path": accept("rollouts are written to the run's rollouts/ folder"),
    "trainer_input.experience_buffer.replay_buffer": read_replay,
    "trainer_input.auxiliary_buffers": read_auxiliary_buffers,
}
PROCESSOR_RULES: dict[str, Rule] = {
    "experience_pipeline.operators": read_operators,
    "experience_pipeline.save_input": accept(),
    "experience_pipeline.input_save_path": allow_neutral("rollouts are written to the run's rollouts/ folder"),
    "experience_pipeline.inputs": allow_neutral("the inputs are the rollouts of the step"),
    "task_pipeline": accept(),  # read by resolve_task_pipeline
}
EXPLORER_WITHOUT_EFFECT = (
    "name", "runner_per_model", "max_repeat_times_per_runner", "over_rollout.wait_after_min",
    "dynamic_timeout.ratio", "dynamic_timeout.warmup_min_steps", "runner_prepare_concurrency",
    "runner_state_report_interval", "min_running_model_num",
)  # fmt: skip
EXPLORER_RULES: dict[str, Rule] = {
    **dict.fromkeys(EXPLORER_WITHOUT_EFFECT, accept()),
    "max_timeout": move("rollout.timeout_s"),
    "max_retry_times": accept("a failed rollout is left out of its group and counted, not retried", silent=(0,)),
    "eval_interval": move("evaluation.interval_steps"),
    "eval_on_startup": move("evaluation.at_start"),
    "over_rollout.ratio": accept("a step waits for all its tasks; lower max_timeout", silent=(0,)),
    "over_rollout.return_partial_tasks": accept("a step waits for all its tasks", silent=(False,)),
    "dynamic_timeout.enable": accept(
        "a timeout measured at run time makes runs differ; max_timeout holds", silent=(False,)
    ),
    "concurrent_mode": accept("workflows always run concurrently, at most rollout.max_concurrency at once"),
    "max_inflight_batches": accept(SHARED_WEIGHTS),
    "env_vars": accept("set environment variables before you start the process", silent=({},)),
    "bench_on_latest_checkpoint": allow_neutral("evaluate models on held-out tasks with `tunesmith eval`"),
    "proxy_port": accept(PROXY),
    "listen_address": accept(PROXY),
    "db_url": allow_neutral(PROXY),
    "auxiliary_models": read_auxiliary_models,
}
ROLLOUT_MODEL_WITHOUT_EFFECT = (
    "enforce_eager", "enable_chunked_prefill", "enable_openai_api", "enable_log_requests", "use_v1",
    "base_port", "api_key", "weight_sync_buffer_size",
)  # fmt: skip
ROLLOUT_MODEL_RULES: dict[str, Rule] = {
    **dict.fromkeys(ROLLOUT_MODEL_WITHOUT_EFFECT, accept()),
    "engine_type": allow("vllm", "sglang", reason="Tunesmith has its own engine in this process; remove it"),
    "engine_num": accept(),  # read by resolve_cluster
    "tensor_parallel_size": accept(),  # read by resolve_cluster
    "data_parallel_size": allow(1, reason=ONE_DEVICE),
    "pipeline_parallel_size": allow(1, reason=ONE_DEVICE),
    "gpu_memory_utilization": accept("set engine.kv_cache_gib or engine.kv_cache_tokens for the KV cache's size"),
    "dtype": move("model.dtype"),
    "seed": move("seed"),
    "enable_prefix_caching": read_prefix_caching,
    "enable_history": allow(True, reason="model calls that are not recorded cannot be trained"),
    "enable_auto_tool_choice": read_auto_tool_choice,
    "tool_call_parser": move("model.tool_call_parser"),
    "reasoning_parser": move("model.reasoning_parser"),
    "enable_thinking": move("model.enable_thinking"),
    "max_model_len": move("model.max_model_len"),
    "model_path": move("model.path"),
    "chat_template": allow_neutral("save the template to a file and set model.chat_template_path"),
    "extra_engine_args": allow_neutral("Tunesmith uses its own engine; see the engine section"),
}
SYNCHRONIZER_RULES: dict[str, Rule] = {
    "sync_style": read_sync_style,
    "sync_method": allow(
        "nccl", "checkpoint", "memory", reason="use nccl, checkpoint or memory; weights are shared, not transferred"
    ),
    "sync_interval": accept(
        f"Trinity-RFT copies weights every sync_interval steps; here {SHARED_WEIGHTS}", silent=(1,)
    ),
    "sync_offset": accept(f"in Trinity-RFT the explorer runs ahead by it; {SHARED_WEIGHTS}", silent=(0,)),
    "sync_timeout": accept(),
}
TRAINER_WITHOUT_EFFECT = (
    "name", "save_hf_checkpoint", "save_strategy", "use_dynamic_bsz", "balance_batch", "use_remove_padding",
    "fix_actor_microbatch_loss_scale", "enable_preview",
)  # fmt: skip
TRAINER_RULES: dict[str, Rule] = {
    **dict.fromkeys(TRAINER_WITHOUT_EFFECT, accept()),
    "total_steps": move("total_steps"),
    "save_interval": read_save_interval,
    "max_checkpoints_to_keep": move("keep_checkpoints", lambda number: number or None),
    "trainer_type": allow("verl", reason="training is local; nearest is model.device"),
    "trainer_strategy": accept(ONE_DEVICE),
    "grad_clip": move("trainer.max_grad_norm"),
    "max_token_len_per_gpu": move("trainer.max_tokens_per_row"),
    "ulysses_sequence_parallel_size": accept(f"it divides long rows over GPUs, and {SHARDING}", silent=(1,)),
    "critic_warmup": move_for_critic("algorithm.critic.warmup_steps"),
    **dict.fromkeys(
        ("param_offload", "optimizer_offload", "grad_offload", "offload_policy", "megatron"), allow_neutral(SHARDING)
    ),
    "trainer_config": read_trainer_config,
}
SECTIONS: dict[str, dict[str, Rule]] = {
    "algorithm": ALGORITHM_RULES,
    "model": MODEL_RULES,
    "buffer": BUFFER_RULES,
    "data_processor": PROCESSOR_RULES,
    "explorer": EXPLORER_RULES,
    "explorer.rollout_model": ROLLOUT_MODEL_RULES,
    "synchronizer": SYNCHRONIZER_RULES,
    "trainer": TRAINER_RULES,
}
RULES: dict[str, Rule] = RUN_RULES | {
    f"{section}.{key}": rule for section, rules in SECTIONS.items() for key, rule in rules.items()
}
