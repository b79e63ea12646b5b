"""Trinity-RFT's run files, and what each of their keys sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from trinity_files import read_notes, translate

from tunesmith.commands.settings import load_file, load_run_file
from tunesmith.compat.trinity_rules import RULES
from tunesmith.compat.trinity_yaml import is_trinity_file
from tunesmith.config import AdaptiveKlSection, CorrectionSection, LoraSection, MaskSection, RunConfig, SftConfig
from tunesmith.errors import ConfigError

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "data_augment"
MATH_AGENT = """
project: AgentScope
name: GSM8K-Qwen3-0.6B
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm: {algorithm_type: multi_step_grpo, repeat_times: 8}
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen3-0.6B}
  max_response_tokens: 16384
  max_model_len: 24576
  temperature: 1.0
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_epochs: 1
  batch_size: 32
  train_batch_size: 256
  explorer_input:
    taskset: {name: gsm8k, path: openai/gsm8k, subset_name: main, split: train}
explorer:
  runner_per_model: 16
  max_timeout: 600
  rollout_model:
    engine_num: 4
    tensor_parallel_size: 1
    enable_openai_api: true
    enable_history: true
    enable_auto_tool_choice: true
    tool_call_parser: hermes
    reasoning_parser: deepseek_r1
synchronizer: {sync_style: dynamic_by_explorer, sync_method: nccl, sync_interval: 1, sync_timeout: 1800}
trainer: {save_interval: 100, use_dynamic_bsz: true, ulysses_sequence_parallel_size: 1}
monitor: {monitor_type: tensorboard}
"""


def read(config, key):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def test_the_recipes_files_are_recognized_and_translated(monkeypatch):
    monkeypatch.setenv("TUNESMITH_MODEL", "my/model")
    chance, bots = (load_run_file(RECIPE / f"config_{name}.yaml") for name in ("random", "difficulty"))
    assert chance.train_dataset.task_selector.selector_type == "random"
    selector = bots.train_dataset.task_selector
    assert selector.selector_type == "difficulty_based"
    assert selector.feature_keys == ("qwen2.5_7b_pass_rate", "qwen3_30b_pass_rate")
    assert selector.args == {"m": 8, "lamb": 0.1, "rho": 0.1, "target_reward": 0.8, "tau": 0, "do_sample": True}
    assert [operator.name for operator in bots.experience.operators] == ["pass_rate_calculator"]
    assert (bots.algorithm.group_size, bots.algorithm.batch_size, bots.evaluation.interval_steps) == (8, 16, 20)
    assert bots.model.path == "my/model" and bots.eval_datasets["aime24"].split == "test"
    differing = {"name", "train_dataset", "experience"}
    assert chance.model_dump(exclude=differing) == bots.model_dump(exclude=differing)


def test_the_math_agents_file_is_translated(tmp_path, caplog):
    path = tmp_path / "config.yaml"
    path.write_text(MATH_AGENT)
    config = load_file(RunConfig, path, ["total_steps=3"], values={"algorithm": {"batch_size": 8}})
    assert (config.name, config.checkpoint_root_dir, config.total_steps) == ("GSM8K-Qwen3-0.6B", "./checkpoints", 3)
    assert (config.model.path, config.model.max_model_len, config.model.max_tokens) == ("Qwen/Qwen3-0.6B", 24576, 16384)
    assert (config.train_dataset.path, config.train_dataset.name) == ("openai/gsm8k", "main")
    assert (config.algorithm.group_size, config.algorithm.batch_size, config.trainer.num_minibatches) == (8, 8, 1)
    assert (config.cluster.num_workers, config.rollout.max_concurrency, config.rollout.timeout_s) == (8, 8, 600)
    assert "rollout_model.engine_num=4" in caplog.text


def test_a_cluster_section_of_ours_is_not_trinitys():
    assert not is_trinity_file({"cluster": {"launcher": "ray", "num_workers": 16}})
    assert is_trinity_file({"cluster": {"gpu_per_node": 8}})


def test_several_hosts_are_a_run_under_ray():
    config = translate(("cluster", {"node_num": 2, "gpu_per_node": 8}), ("ray_namespace", "x"))
    cluster = config.cluster
    assert (cluster.launcher, cluster.num_workers, cluster.ray_namespace) == ("ray", 16, "x")


@pytest.mark.parametrize("num_engines", [2, 8])
def test_each_gpu_has_one_engine_whatever_their_number(num_engines):
    keys = [("cluster.gpu_per_node", 4), ("explorer.rollout_model.engine_num", num_engines)]
    assert translate(*keys).cluster.num_workers == 4
    assert any(f"engine_num={num_engines}: all 4 GPUs sample and train" in note for note in read_notes(*keys))


def test_a_model_split_over_gpus_is_sampled_by_one_vllm():
    size = ("explorer.rollout_model.tensor_parallel_size", 2)
    config = translate(size, ("cluster.gpu_per_node", 4))
    assert (config.engine.kind, config.engine.tensor_parallel_size) == ("vllm", 2)
    assert (config.cluster.num_workers, config.cluster.has_sharded_weights) == (4, True)
    assert translate(size).cluster.num_workers == 2
    adapter = translate(size, ("cluster.gpu_per_node", 2), ("model.lora_configs", [{"name": "a", "lora_rank": 8}]))
    assert (adapter.engine.kind, adapter.cluster.num_workers, adapter.cluster.has_sharded_weights) == (
        "vllm", None, False,
    )  # fmt: skip
    engines = ("explorer.rollout_model.engine_num", 2)
    assert translate(size, engines) == translate(size)
    assert any("one vLLM engine over 2 GPUs" in each for each in read_notes(size, engines))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .*gpu_per_node=1.*raise"):
        translate(size, ("cluster.gpu_per_node", 1))


def test_a_tunesmith_file_is_not_a_trinity_file():
    assert not is_trinity_file({"model": {"path": "m"}, "trainer": {}, "algorithm": {}, "monitor": {}})
    assert is_trinity_file({"buffer": {}})


MOVED = [
    ("cluster.gpu_per_node", 4, "cluster.num_workers", 4),
    ("explorer.rollout_model.engine_num", 4, "cluster.num_workers", 4),
    ("project", "p", "project", "p"),
    ("name", "n", "name", "n"),
    ("checkpoint_root_dir", "c", "checkpoint_root_dir", "c"),
    ("continue_from_checkpoint", True, "continue_from_checkpoint", True),
    ("algorithm.algorithm_type", "grpo", "algorithm.algorithm_type", "grpo"),
    ("algorithm.repeat_times", 4, "algorithm.group_size", 4),
    ("algorithm.optimizer.lr", 1e-5, "trainer.learning_rate", 1e-5),
    ("algorithm.optimizer.lr_warmup_steps", -1, "trainer.warmup_steps", 0),
    ("algorithm.optimizer.lr_warmup_steps_ratio", 0.1, "trainer.warmup_ratio", 0.1),
    ("algorithm.optimizer", {"lr_warmup_steps": 5, "lr_warmup_steps_ratio": 0.1}, "trainer.warmup_ratio", 0.0),
    ("algorithm.optimizer.lr_scheduler_type", "cosine", "trainer.schedule", "cosine"),
    (
        "algorithm.optimizer", {"min_lr_ratio": 0.1, "lr_scheduler_type": "cosine"},
        "trainer.min_lr_ratio", 0.1,
    ),
    ("algorithm.optimizer.betas", [0.8, 0.9], "trainer.betas", (0.8, 0.9)),
    ("algorithm.optimizer.weight_decay", 0.02, "trainer.weight_decay", 0.02),
    ("algorithm.optimizer.clip_grad", 0.5, "trainer.max_grad_norm", 0.5),
    ("algorithm.policy_loss_fn_args", {"clip_range_high": 0.28}, "algorithm.loss_args", {"clip_range_high": 0.28}),
    (
        "algorithm.policy_loss_fn_args", {"clip_range": 0.1},
        "algorithm.loss_args", {"clip_range_low": 0.1, "clip_range_high": 0.1},
    ),
    (
        "algorithm.policy_loss_fn_args", {"loss_agg_mode": "seq-mean-token-sum"},
        "algorithm.loss_aggregation", "seq-mean-token-sum",
    ),
    ("algorithm.loss_agg_mode", "seq-mean-token-mean", "algorithm.loss_aggregation", "seq-mean-token-mean"),
    ("algorithm.kl_loss_fn", "k2", "algorithm.kl_coef", 0.001),
    ("algorithm.kl_loss_fn", "low_var_kl", "algorithm.kl_estimator", "k3"),
    ("algorithm.kl_loss_fn", "none", "algorithm.kl_coef", 0.0),
    ("algorithm.kl_loss_fn", "abs", "algorithm.kl_estimator", "abs"),
    ("algorithm.kl_loss_fn", "corrected_k3", "algorithm.kl_estimator", "corrected_k3"),
    ("algorithm.kl_loss_fn_args", {"kl_coef": 0.02}, "algorithm.kl_coef", 0.02),
    (
        "algorithm.kl_loss_fn_args", {"kl_coef": 0.02, "adaptive": True, "target_kl": 0.1, "horizon": 500},
        "algorithm.kl_adaptive", AdaptiveKlSection(target=0.1, horizon=500),
    ),
    (
        "algorithm.policy_loss_fn_args", {"enable_sequence_masking": True, "delta_sequence_masking": 0.2},
        "algorithm.correction.negative_sequence_delta", 0.2,
    ),
    (
        "algorithm.advantage_fn_args", {"std_threshold": None, "epsilon": 0.1},
        "algorithm.advantage_args", {"epsilon": 0.1},
    ),
    (
        "algorithm.rollout_correction", {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
        "algorithm.correction", CorrectionSection(importance="sequence", cap=3.0),
    ),
    (
        "algorithm.rollout_correction", {"rollout_is": None, "rollout_is_threshold": 3.0},
        "algorithm.correction", CorrectionSection(),
    ),
    (
        "algorithm.rollout_correction", {"rollout_rs": "geometric", "rollout_rs_threshold": 1.25},
        "algorithm.correction.mask", MaskSection(level="geometric", low=0.8, high=1.25),
    ),
    ("algorithm.entropy_loss_fn_args", {"entropy_coef": 0.01}, "algorithm.entropy_coef", 0.01),
    ("algorithm.entropy_loss_fn", "none", "algorithm.entropy_coef", 0.0),
    ("algorithm.advantage_fn_args", {"enable_step_norm": True}, "algorithm.advantage_args", {"enable_step_norm": True}),
    ("model.max_model_len", 99, "model.max_model_len", 99),
    ("model.max_response_tokens", 9, "model.max_tokens", 9),
    ("model.temperature", 0.7, "model.temperature", 0.7),
    ("model.top_p", 0.9, "model.top_p", 0.9),
    ("model.top_k", -1, "model.top_k", 0),
    ("model.top_k", 5, "model.top_k", 5),
    ("model.enable_thinking", False, "model.enable_thinking", False),
    ("model.chat_template_path", "t.jinja", "model.chat_template", "t.jinja"),
    ("buffer.total_epochs", 3, "total_epochs", 3),
    ("buffer.total_steps", 7, "total_steps", 7),
    ("buffer.batch_size", 5, "algorithm.batch_size", 5),
    ("buffer.train_batch_size", 64, "trainer.num_minibatches", 4),
    ("buffer.train_batch_size", 0, "trainer.num_minibatches", 1),
    ("buffer.train_batch_size", 2048, "trainer.num_minibatches", 1),
    ("buffer.explorer_input.taskset", {"path": "d", "split": "s"}, "train_dataset.split", "s"),
    ("buffer.explorer_input.taskset", {"path": "d", "subset_name": "x"}, "train_dataset.name", "x"),
    ("buffer.explorer_input.taskset", {"path": "d", "repeat_times": 3}, "algorithm.group_size", 3),
    ("buffer.explorer_input.taskset", {"path": "d", "rollout_args": {"temperature": 0.3}}, "model.temperature", 0.3),
    ("buffer.explorer_input.taskset", {"path": "d", "rollout_args": {"max_tokens": 7}}, "model.max_tokens", 7),
    (
        "buffer.explorer_input.taskset", {"path": "d", "task_selector": {"selector_type": "random", "seed": 3}},
        "train_dataset.task_selector.seed", 3,
    ),
    (
        "buffer.explorer_input.taskset", {"path": "d", "data_selector": {"selector_type": "shuffle"}},
        "train_dataset.task_selector.selector_type", "shuffle",
    ),
    ("buffer.explorer_input.tasksets", [{"path": "d"}], "train_dataset.path", "d"),
    ("buffer.explorer_input.tasksets", [{"path": "d"}, {"path": "e", "name": "b"}], "train_datasets.b.path", "e"),
    ("buffer.explorer_input.eval_tasksets", [{"path": "e", "name": "held"}], "eval_datasets.held.path", "e"),
    ("buffer.explorer_input.eval_tasksets", [{"path": "e", "repeat_times": 4}], "evaluation.num_samples", 4),
    (
        "buffer.explorer_input.eval_tasksets", [{"path": "e", "rollout_args": {"temperature": 0.0}}],
        "evaluation.temperature", 0.0,
    ),
    (
        "buffer.trainer_input.experience_buffer.replay_buffer",
        {"enable": True, "reuse_cooldown_time": 1.0, "priority_fn": "linear_decay", "priority_fn_args": {"decay": 0.5}},
        "experience.replay.decay", 0.5,
    ),
    (
        "buffer.trainer_input.experience_buffer.replay_buffer", {"enable": True, "priority_fn_args": {"decay": 0.5}},
        "experience.replay.num_groups", 0,
    ),
    (
        "data_processor.experience_pipeline.operators", [{"name": "reward_filter", "args": {"threshold": 0.5}}],
        "experience.operators.0.args", {"threshold": 0.5},
    ),
    ("explorer.runner_per_model", 6, "rollout.max_concurrency", 6),
    ("explorer.max_timeout", 90, "rollout.timeout_s", 90),
    ("explorer.eval_interval", 20, "evaluation.interval_steps", 20),
    ("explorer.eval_on_startup", True, "evaluation.at_start", True),
    ("explorer.rollout_model.dtype", "bfloat16", "model.dtype", "bfloat16"),
    ("explorer.rollout_model.seed", 7, "seed", 7),
    ("explorer.rollout_model.enable_prefix_caching", False, "engine.has_prefix_cache", False),
    ("explorer.rollout_model.tool_call_parser", "hermes", "model.tool_call_parser", "hermes"),
    ("explorer.rollout_model.enable_auto_tool_choice", False, "model.tool_call_parser", "none"),
    ("explorer.rollout_model.reasoning_parser", "deepseek_r1", "model.reasoning_parser", "deepseek_r1"),
    ("explorer.rollout_model.enable_thinking", True, "model.enable_thinking", True),
    ("explorer.rollout_model.max_model_len", 77, "model.max_model_len", 77),
    (
        "explorer.auxiliary_models", [{"name": "grader", "model_path": "h", "max_model_len": 64, "engine_num": 1}],
        "auxiliary_models.grader.path", "h",
    ),
    ("trainer.save_interval", 50, "save_interval_steps", 50),
    ("trainer.total_steps", 9, "total_steps", 9),
    ("trainer.max_checkpoints_to_keep", 2, "keep_checkpoints", 2),
    ("trainer.grad_clip", 0.3, "trainer.max_grad_norm", 0.3),
    ("trainer.max_token_len_per_gpu", 512, "trainer.max_tokens_per_row", 512),
    ("monitor.monitor_type", "tensorboard", "monitor.trackers", ("tensorboard",)),
    ("monitor.monitor_type", "wandb", "monitor.trackers", ("wandb",)),
    ("model.lora_configs", [{"name": "a", "lora_rank": 8}], "model.lora.r", 8),
    ("model.lora_configs", [{"name": "a"}], "model.lora", LoraSection(r=32, alpha=32, target_modules="all-linear")),
    ("model.lora_configs", [{"target_modules": ["q_proj"]}], "model.lora.target_modules", ("q_proj",)),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "ours", "expected"), MOVED)
def test_a_key_sets_ours(key, value, ours, expected):
    config = translate((key, value))
    if ".0." in ours:
        section, field = ours.split(".0.")
        assert getattr(read(config, section)[0], field) == expected
    else:
        assert read(config, ours) == expected


USED = [
    "project", "name", "group", "checkpoint_root_dir", "algorithm.algorithm_type", "algorithm.repeat_times",
    "algorithm.optimizer.lr", "algorithm.policy_loss_fn", "algorithm.policy_loss_fn_args", "algorithm.kl_loss_fn",
    "algorithm.kl_loss_fn_args", "algorithm.advantage_fn_args", "model.model_path", "model.max_model_len",
    "model.max_prompt_tokens", "model.max_response_tokens", "model.temperature", "model.top_p", "model.top_k",
    "model.logprobs", "model.enable_thinking", "model.tinker", "cluster.node_num", "cluster.gpu_per_node",
    "cluster.ray_address", "buffer.total_epochs", "buffer.total_steps", "buffer.batch_size",
    "buffer.train_batch_size", "buffer.explorer_input.taskset", "buffer.explorer_input.tasksets",
    "buffer.explorer_input.eval_tasksets", "buffer.trainer_input.experience_buffer.name",
    "buffer.trainer_input.experience_buffer.storage_type", "buffer.trainer_input.experience_buffer.path",
    "buffer.trainer_input.experience_buffer.capacity", "buffer.trainer_input.experience_buffer.max_read_timeout",
    "buffer.trainer_input.experience_buffer.replay_buffer", "data_processor.experience_pipeline.operators",
    "explorer.runner_per_model", "explorer.max_timeout", "explorer.max_retry_times",
    "explorer.max_repeat_times_per_runner", "explorer.eval_interval", "explorer.eval_on_startup",
    "explorer.over_rollout.ratio", "explorer.over_rollout.wait_after_min",
    "explorer.over_rollout.return_partial_tasks", "explorer.dynamic_timeout.enable", "explorer.dynamic_timeout.ratio",
    "explorer.dynamic_timeout.warmup_min_steps", "explorer.rollout_model.engine_num",
    "explorer.rollout_model.tensor_parallel_size", "explorer.rollout_model.gpu_memory_utilization",
    "explorer.rollout_model.dtype", "explorer.rollout_model.seed", "explorer.rollout_model.enforce_eager",
    "explorer.rollout_model.enable_prefix_caching", "explorer.rollout_model.enable_openai_api",
    "explorer.rollout_model.enable_history", "explorer.rollout_model.enable_auto_tool_choice",
    "explorer.rollout_model.tool_call_parser", "explorer.rollout_model.reasoning_parser",
    "explorer.rollout_model.enable_thinking", "explorer.rollout_model.max_model_len", "explorer.auxiliary_models",
    "synchronizer.sync_style", "synchronizer.sync_method", "synchronizer.sync_interval", "synchronizer.sync_timeout",
    "trainer.save_interval", "trainer.grad_clip", "trainer.use_dynamic_bsz", "trainer.max_token_len_per_gpu",
    "trainer.ulysses_sequence_parallel_size", "monitor.monitor_type",
]  # fmt: skip


def test_every_key_of_the_published_examples_has_a_rule():
    assert [key for key in USED if key not in RULES] == []


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({"max_prompt_tokens": 100, "max_response_tokens": 28}, (128, 28)),
        ({"max_prompt_tokens": 100, "max_model_len": 128}, (128, 28)),
        ({"max_prompt_tokens": 100, "max_model_len": 128, "max_response_tokens": 28}, (128, 28)),
        ({"max_prompt_tokens": 110, "max_model_len": 128, "max_response_tokens": 28}, (128, 28)),
        ({"max_prompt_tokens": 90, "max_model_len": 128, "max_response_tokens": 28}, "set max_model_len=118"),
        ({"max_prompt_tokens": 90}, "does not determine the context"),
    ],
)
def test_two_lengths_determine_the_third(lengths, expected):
    pairs = [(f"model.{name}", value) for name, value in lengths.items()]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            translate(*pairs)
    else:
        config = translate(*pairs)
        assert (config.model.max_model_len, config.model.max_tokens) == expected


@pytest.mark.parametrize(
    ("rollout_model", "lora", "num_ranks", "expected"),
    [
        ({"engine_num": 2}, None, 8, 4),
        ({"tensor_parallel_size": 4}, None, 8, 16),
        ({"tensor_parallel_size": 4}, [{"lora_rank": 8}], 1, 16),
    ],
)
def test_the_ranks_that_sample_share_the_runners(rollout_model, lora, num_ranks, expected):
    config = translate(
        ("cluster.gpu_per_node", 8), ("model.lora_configs", lora),
        ("explorer", {"runner_per_model": 16, "rollout_model": rollout_model}),
    )  # fmt: skip
    assert (config.cluster.num_workers or 1, config.rollout.max_concurrency) == (num_ranks, expected)


@pytest.mark.parametrize(
    ("training", "given", "used"),
    [
        ({}, {"top_p": 0.9}, 1.0),
        ({"model.top_p": 0.8}, {"top_p": 0.9}, 0.8),
        ({"model.max_response_tokens": 5}, {"max_tokens": 7}, 5),
        ({"buffer.explorer_input.taskset": {"path": "d", "rollout_args": {"top_k": 3}}}, {"top_k": 4}, 3),
        ({"model.top_k": 4}, {"top_k": 4, "n": 1, "logprobs": 0}, None),
    ],
)
def test_a_sampling_parameter_of_evaluations_alone_is_noted(training, given, used):
    sets = ("buffer.explorer_input.eval_tasksets", [{"path": "e", "rollout_args": given}])
    notes = [note for note in read_notes(*training.items(), sets) if "rollout_args" in note]
    name, value = next(iter(given.items()))
    key = f"buffer.explorer_input.eval_tasksets[0].rollout_args.{name}"
    told = f"{key}={value!r} has no effect: evaluations sample as training, with {used!r}"
    assert notes == ([] if used is None else [told])


def test_numbers_in_quotes_and_of_environment_variables_are_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUS", "2")
    file = tmp_path / "file.yaml"
    file.write_text(
        "cluster: {node_num: '1', gpu_per_node: '${oc.env:GPUS}'}\n"
        "algorithm: {repeat_times: '8', optimizer: {lr: '1e-5'}}\n"
        "model: {model_path: m, max_model_len: '4096', max_prompt_tokens: '1024', top_k: '-1'}\n"
        "buffer: {batch_size: '4', train_batch_size: '16'}\n"
        "explorer: {runner_per_model: '6', rollout_model: {engine_num: '2', tensor_parallel_size: '1'}}\n"
    )
    config = load_run_file(file)
    assert (config.cluster.num_workers, config.trainer.num_minibatches, config.rollout.max_concurrency) == (2, 2, 6)
    assert (config.model.max_tokens, config.model.top_k, config.trainer.learning_rate) == (3072, 0, 1e-5)


def test_numbers_in_quotes_are_numbers_in_files_of_fine_tuning(tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text(
        "mode: train\nalgorithm: {algorithm_type: sft, optimizer: {lr: 1e-5}}\n"
        "model: {model_path: m, max_model_len: '4096'}\n"
        "buffer: {train_batch_size: '4', trainer_input: {experience_buffer: {storage_type: file, path: rows}}}\n"
    )
    config = load_file(SftConfig, file)
    assert (config.max_rows_per_batch, config.max_tokens_per_batch) == (4, 16384)


def test_a_number_that_is_not_one_is_an_error_of_its_config():
    with pytest.raises(ConfigError, match="weight_decay"):
        translate(("algorithm.optimizer.weight_decay", float("nan")))
