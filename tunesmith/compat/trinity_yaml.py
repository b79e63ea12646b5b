"""Trinity-RFT's run files, key by key, as a run file of ours.

One table says what becomes of each key: it is honoured by a key of ours, holds anyway, or is refused with the reason
and the nearest thing there is. A key that is absent takes our default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.compat.trinity_algorithms import (
    read_advantage_args,
    read_algorithm,
    read_correction,
    read_entropy_args,
    read_entropy_name,
    read_kl_args,
    read_kl_name,
    read_loss_args,
    read_penalty_args,
    read_penalty_name,
)
from tunesmith.compat.trinity_differences import settle_differences
from tunesmith.compat.trinity_draft import (
    ONE_ENGINE,
    SHARED_WEIGHTS,
    Draft,
    Rule,
    accept,
    allow,
    allow_neutral,
    move,
    walk,
)
from tunesmith.compat.trinity_extra_models import (
    move_for_critic,
    read_auxiliary_buffers,
    read_sample_strategy,
    read_sample_strategy_args,
)
from tunesmith.compat.trinity_parts import (
    ADAPTER,
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

MARKS = frozenset({"buffer", "explorer", "synchronizer", "data_processor", "cluster", "mode", "stages", "service"})
"""Top-level keys that only Trinity's files have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A file in our words."""

    values: dict[str, Any]
    notes: tuple[str, ...]
    """What is met in another way than the file says."""


def is_trinity_file(values: Mapping[str, Any]) -> bool:
    """Whether a run file is Trinity-RFT's."""
    return not MARKS.isdisjoint(values)


def translate_trinity_file(values: Mapping[str, Any]) -> Translation:
    """Nested values of a run file of ours; a key that cannot be honoured is a ConfigError that says why."""
    draft = Draft(values)
    walk(draft, RULES, values, place="")
    settle_lengths(draft)
    settle_concurrency(draft)
    settle_differences(draft)
    return Translation(values=draft.values, notes=tuple(draft.notes))


def refuse_mode(draft: Draft, key: str, value: Any) -> None:
    nearest = {
        "bench": "try models on held-out tasks with `tunesmith eval`",
        "explore": "rollouts of a run are in its rollouts/ folder; `tunesmith eval` makes some without training",
        "train": "`tunesmith tune` samples and trains; `tunesmith sft` and `tunesmith prefer` learn from files",
        "serve": "there is no proxy that collects feedback",
    }
    if str(value).casefold() not in ("both", "colocate"):
        raise ConfigError(f"{key}={value!r} cannot be honoured: {nearest.get(value, 'it is both or colocate')}")


def read_save_interval(draft: Draft, key: str, value: Any) -> None:
    if value == 0:
        raise ConfigError(f"{key}=0 cannot be honoured: a run must be able to go on after a kill; leave it out")
    move("save_interval_steps")(draft, key, value)


def read_train_batch_size(draft: Draft, key: str, value: Any) -> None:
    """Trinity counts experiences an update; here a step's groups are dealt to a number of updates."""
    defaults = AlgorithmSection()
    batch_size = draft.find("buffer.batch_size", defaults.batch_size)
    num_runs = batch_size * draft.find("algorithm.repeat_times", defaults.group_size)
    if not value or value >= num_runs:
        if value and value > num_runs:
            draft.notes.append(f"{key}={value!r}: all that a step sampled makes one update, whatever its number")
    elif num_runs % value:
        raise ConfigError(
            f"{key}={value!r} cannot be honoured: it must divide batch_size * repeat_times = {num_runs}; nearest is "
            "trainer.num_minibatches, the updates made of a step"
        )
    else:
        draft.set("trainer.num_minibatches", num_runs // value, source=key)


def read_warmup_ratio(draft: Draft, key: str, value: Any) -> None:
    """A share of all steps, which counts where no number of steps is given."""
    if value and draft.find("algorithm.optimizer.lr_warmup_steps", -1) < 0:
        draft.set("trainer.warmup_ratio", float(value), source=key)
        draft.notes.append(f"{key}={value!r}: the steps of the warm-up are rounded up")


def read_auto_tool_choice(draft: Draft, key: str, value: Any) -> None:
    if value is False:
        draft.set("model.tool_call_parser", "none", source=key, is_finer=True)


def read_tinker(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, Mapping) and value.get("enable"):
        raise ConfigError(f"{key}.enable=True cannot be honoured: training is local; nearest is model.device")


def read_sync_style(draft: Draft, key: str, value: Any) -> None:
    """Who asks for new weights, and when; here a step is sampled by the newest policy, whoever would ask."""
    allow(*IN_TURN_STYLES, *OVERLAPPING_STYLES, reason=f"a style is {', '.join(SYNC_STYLES)}")(draft, key, value)
    if str(value).casefold() in OVERLAPPING_STYLES:
        draft.notes.append(f"{key}={value!r}: a step is sampled, then trained; {SHARED_WEIGHTS}")


def settle_lengths(draft: Draft) -> None:
    """Prompt, answer and context in tokens; two of them give the third, and prompts may fill what is left."""
    total, prompt, answer = (
        draft.find(f"model.{name}") for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    )
    if prompt is None:
        return
    if total is None and answer is None:
        raise ConfigError(f"model.max_prompt_tokens={prompt} alone says nothing of the context: set max_model_len")
    if total is None:
        draft.set("model.max_model_len", prompt + answer, source="model.max_prompt_tokens")
    elif answer is None:
        draft.set("model.max_tokens", total - prompt, source="model.max_prompt_tokens")
    elif prompt + answer != total:
        raise ConfigError(
            f"model.max_prompt_tokens={prompt} cannot be honoured: prompts may fill what the answer leaves of the "
            f"context; leave it out, or set max_model_len={prompt + answer}"
        )


def settle_concurrency(draft: Draft) -> None:
    """Runners of all engines together are the workflows in flight."""
    runners = draft.find("explorer.runner_per_model")
    if runners is not None:
        engines = draft.find("explorer.rollout_model.engine_num", 1)
        draft.set("rollout.max_concurrency", runners * engines, source="explorer.runner_per_model")


ONE_DEVICE = "one process trains on one device (model.device)"
PROXY = "it belongs to the serve mode, and there is no proxy that collects feedback"
IN_TURN_STYLES = ("fixed", "explorer_driven", "dynamic_by_explorer")
"""The sampler gets the newest weights before its steps: what happens here."""
OVERLAPPING_STYLES = ("trainer_driven", "dynamic_by_trainer", "fully_async")
"""The sampler goes on with old weights until the trainer is done."""
SYNC_STYLES = ("fixed", "explorer_driven", "trainer_driven", "fully_async")
"""As they are called today; dynamic_by_... are older names."""
SHARDING = f"{ONE_DEVICE}; to save memory set trainer.has_gradient_checkpointing or trainer.max_token_len_per_gpu"

RUN_RULES: dict[str, Rule] = {
    "project": move("project"),
    "name": move("name"),
    "group": allow_neutral("a run is named by project and name; put the group into name"),
    "checkpoint_root_dir": move("checkpoint_root_dir"),
    "mode": refuse_mode,
    "continue_from_checkpoint": move("continue_from_checkpoint"),
    "ray_namespace": accept("no Ray cluster is used"),
    "ignore_validator_suggestions": accept(),
    "stages": allow_neutral("one file is one run; run one file a stage, each with the last one's checkpoint as model"),
    "cluster.node_num": allow(0, 1, reason=ONE_DEVICE),
    "cluster.gpu_per_node": accept(ONE_DEVICE, silent=(0, 1)),
    "cluster.ray_address": accept("no Ray cluster is used", silent=("auto",)),
    "service": allow_neutral("no Data-Juicer service is used; nearest is train_dataset.operators"),
    "log": accept("the log goes to the console"),
    "monitor.monitor_type": move("monitor.trackers", lambda tracker: [tracker]),
    "monitor.monitor_args": allow_neutral("a tracker has no arguments here"),
    "monitor.detailed_stats": accept(),
    "monitor.enable_ray_timeline": allow_neutral("no Ray cluster is used"),
}
ALGORITHM_RULES: dict[str, Rule] = {
    "algorithm_type": read_algorithm,
    "repeat_times": move("algorithm.group_size"),
    "optimizer.lr": move("trainer.learning_rate", float),
    "optimizer.lr_warmup_steps": move("trainer.warmup_steps", lambda steps: max(steps, 0)),
    "optimizer.lr_warmup_steps_ratio": read_warmup_ratio,
    "optimizer.min_lr_ratio": move("trainer.min_lr_ratio", float),
    "optimizer.lr_scheduler_type": move("trainer.schedule"),
    "optimizer.optimizer_type": allow("adam", "adamw", reason="the optimizer is AdamW"),
    "optimizer.betas": move("trainer.betas"),
    "optimizer.weight_decay": move("trainer.weight_decay", float),
    "optimizer.clip_grad": move("trainer.max_grad_norm", float),
    "policy_loss_fn": read_algorithm,
    "policy_loss_fn_args": read_loss_args,
    "advantage_fn": read_algorithm,
    "advantage_fn_args": read_advantage_args,
    "kl_loss_fn": read_kl_name,
    "kl_loss_fn_args": read_kl_args,
    "kl_penalty_fn": read_penalty_name,
    "kl_penalty_fn_args": read_penalty_args,
    "entropy_loss_fn": read_entropy_name,
    "entropy_loss_fn_args": read_entropy_args,
    "loss_agg_mode": move("algorithm.loss_aggregation"),
    "sample_strategy": read_sample_strategy,
    "sample_strategy_args": read_sample_strategy_args,
    "bypass_old_logprobs": allow(True, reason="the old logprobs are the sampler's, as recorded"),
    "rollout_correction": read_correction,
    "enable_router_replay": allow_neutral("sampler and trainer run the same module"),
}
MODEL_RULES: dict[str, Rule] = {
    "model_path": move("model.path"),
    "critic_model_path": move_for_critic("algorithm.critic.path"),
    "max_model_len": move("model.max_model_len"),
    "max_prompt_tokens": accept(),
    "max_response_tokens": move("model.max_tokens"),
    "min_response_tokens": allow(0, 1, reason="an answer ends where the model ends it"),
    "enable_prompt_truncation": accept(),
    "temperature": move("model.temperature", float),
    "top_p": move("model.top_p", float),
    "top_k": move("model.top_k", lambda top_k: max(top_k, 0)),
    "logprobs": accept(),
    "repetition_penalty": allow(1, 1.0, reason="sampled and trained distributions must be one; see model.min_p"),
    "enable_thinking": move("model.enable_thinking"),
    "custom_chat_template": allow_neutral("save the template to a file and name it in chat_template_path"),
    "chat_template_path": move("model.chat_template"),
    "lora_configs": read_lora_configs,
    "rope_scaling": allow_neutral("positions are the model's own; change its config.json"),
    "rope_theta": allow_neutral("positions are the model's own; change its config.json"),
    "external_model": allow_neutral("the trained model is local; see auxiliary_models.<name>.base_url for helpers"),
    "tinker": read_tinker,
}
BUFFER_RULES: dict[str, Rule] = {
    "total_epochs": move("total_epochs"),
    "total_steps": move("total_steps"),
    "batch_size": move("algorithm.batch_size"),
    "train_batch_size": read_train_batch_size,
    "explorer_input.taskset": read_taskset,
    "explorer_input.tasksets": read_tasksets,
    "explorer_input.eval_tasksets": read_eval_tasksets,
    "explorer_input.default_workflow_type": allow(ADAPTER, reason="give the workflow as a function"),
    "explorer_input.default_eval_workflow_type": allow(ADAPTER, reason="evaluations run the run's own workflow"),
    "explorer_input.default_reward_fn_type": allow_neutral("give the judge as a function, judge: module:function"),
    "trainer_input.experience_buffer.name": accept(),
    "trainer_input.experience_buffer.storage_type": allow("queue", reason="what a step samples, it trains"),
    "trainer_input.experience_buffer.path": accept("rollouts are written to the run's rollouts/ folder"),
    "trainer_input.experience_buffer.capacity": accept(),
    "trainer_input.experience_buffer.max_read_timeout": accept(),
    "trainer_input.experience_buffer.replay_buffer": read_replay,
    "trainer_input.auxiliary_buffers": read_auxiliary_buffers,
}
PROCESSOR_RULES: dict[str, Rule] = {
    "experience_pipeline.operators": read_operators,
    "experience_pipeline.save_input": accept(),
    "experience_pipeline.input_save_path": allow_neutral("rollouts are written to the run's rollouts/ folder"),
    "experience_pipeline.inputs": allow_neutral("the inputs are the rollouts of the step"),
    "task_pipeline": allow_neutral("no Data-Juicer service is used; nearest is train_dataset.operators"),
}
EXPLORER_RULES: dict[str, Rule] = {
    "name": accept(),
    "runner_per_model": accept(),
    "max_timeout": move("rollout.timeout_s", float),
    "max_retry_times": allow(0, reason="a run that fails is left out of its group and counted, never tried again"),
    "max_repeat_times_per_runner": accept(),
    "eval_interval": move("evaluation.interval_steps"),
    "eval_on_startup": move("evaluation.at_start"),
    "over_rollout.ratio": allow(0, reason="every task of a step is waited for; lower max_timeout"),
    "over_rollout.wait_after_min": accept(),
    "over_rollout.return_partial_tasks": allow_neutral("every task of a step is waited for"),
    "dynamic_timeout.enable": allow_neutral("a deadline that depends on the clock makes runs differ; set max_timeout"),
    "dynamic_timeout.ratio": accept(),
    "dynamic_timeout.warmup_min_steps": accept(),
    "concurrent_mode": accept("workflows run concurrently, rollout.max_concurrency at once"),
    "runner_prepare_concurrency": accept(),
    "runner_state_report_interval": accept(),
    "min_running_model_num": accept(),
    "max_inflight_batches": accept(SHARED_WEIGHTS),
    "env_vars": allow_neutral("set the environment of the process"),
    "bench_on_latest_checkpoint": allow_neutral("try models on held-out tasks with `tunesmith eval`"),
    "proxy_port": accept(PROXY),
    "listen_address": accept(PROXY),
    "db_url": allow_neutral(PROXY),
    "auxiliary_models": read_auxiliary_models,
}
ROLLOUT_MODEL_RULES: dict[str, Rule] = {
    "engine_type": allow("vllm", "sglang", reason="the sampler is in this process"),
    "engine_num": accept(ONE_ENGINE, silent=(1,)),
    "tensor_parallel_size": allow(1, reason=ONE_DEVICE),
    "data_parallel_size": allow(1, reason=ONE_DEVICE),
    "pipeline_parallel_size": allow(1, reason=ONE_DEVICE),
    "gpu_memory_utilization": accept("engine.kv_cache_gib or engine.kv_cache_tokens says what the cache may take"),
    "dtype": move("model.dtype"),
    "seed": move("seed"),
    "enforce_eager": accept(),
    "enable_prefix_caching": move("engine.has_prefix_cache"),
    "enable_chunked_prefill": accept(),
    "enable_openai_api": accept(),
    "enable_history": allow(True, reason="what is not recorded cannot train"),
    "enable_auto_tool_choice": read_auto_tool_choice,
    "tool_call_parser": move("model.tool_call_parser"),
    "reasoning_parser": move("model.reasoning_parser"),
    "enable_thinking": move("model.enable_thinking"),
    "max_model_len": move("model.max_model_len"),
    "model_path": move("model.path"),
    "chat_template": allow_neutral("save the template to a file and name it in model.chat_template_path"),
    "extra_engine_args": allow_neutral("the sampler is in this process; see the engine section"),
    "base_port": accept(),
    "api_key": accept(),
    "weight_sync_buffer_size": accept(),
}
SYNCHRONIZER_RULES: dict[str, Rule] = {
    "sync_style": read_sync_style,
    "sync_method": allow(
        "nccl", "checkpoint", "memory", reason="a method is nccl, checkpoint or memory; weights are shared, never sent"
    ),
    "sync_interval": accept(SHARED_WEIGHTS, silent=(1,)),
    "sync_offset": accept(SHARED_WEIGHTS, silent=(0,)),
    "sync_timeout": accept(),
}
TRAINER_RULES: dict[str, Rule] = {
    "name": accept(),
    "total_steps": move("total_steps"),
    "save_interval": read_save_interval,
    "save_hf_checkpoint": accept(),
    "max_checkpoints_to_keep": move("keep_checkpoints", lambda number: number or None),
    "save_strategy": accept(),
    "trainer_type": allow("verl", reason="training is local; nearest is model.device"),
    "trainer_strategy": accept(ONE_DEVICE),
    "grad_clip": move("trainer.max_grad_norm", float),
    "use_dynamic_bsz": accept(),
    "max_token_len_per_gpu": move("trainer.max_tokens_per_row"),
    "ulysses_sequence_parallel_size": allow(1, reason=SHARDING),
    "balance_batch": accept(),
    "use_remove_padding": accept(),
    "fix_actor_microbatch_loss_scale": accept(),
    "enable_preview": accept(),
    "critic_warmup": move_for_critic("algorithm.critic.warmup_steps"),
    "param_offload": allow_neutral(SHARDING),
    "optimizer_offload": allow_neutral(SHARDING),
    "grad_offload": allow_neutral(SHARDING),
    "offload_policy": allow_neutral(SHARDING),
    "megatron": allow_neutral(SHARDING),
    "trainer_config": allow_neutral("every knob of the trainer is a key of ours; see tunesmith config --options"),
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
