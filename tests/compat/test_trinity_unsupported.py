"""Keys of Trinity-RFT's run files that are accepted without effect, noted, or refused with the reason."""

from __future__ import annotations

import pytest
from trinity_files import translate

from tunesmith.compat.trinity_draft import allow_neutral
from tunesmith.compat.trinity_yaml import translate_trinity_file
from tunesmith.errors import ConfigError

ACCEPTED = [
    ("mode", "both"), ("mode", "colocate"), ("group", ""), ("service", {"data_juicer": {}}),
    ("data_processor.task_pipeline", {"operators": []}),
    ("ray_namespace", ""), ("stages", []),
    ("cluster.node_num", 1), ("cluster.gpu_per_node", 0), ("cluster.ray_address", "auto"),
    ("algorithm.policy_loss_fn", "ppo"), ("algorithm.kl_penalty_fn", "none"), ("algorithm.entropy_loss_fn", "default"),
    ("algorithm.sample_strategy", "default"), ("algorithm.bypass_old_logprobs", True),
    ("algorithm.optimizer.optimizer_type", "adam"), ("algorithm.rollout_correction", None),
    ("model.logprobs", 0), ("model.tinker", {"enable": False, "rank": 16}), ("model.lora_configs", None),
    ("buffer.explorer_input.taskset", {"path": "d", "storage_type": "file", "rollout_args": {"logprobs": 0}}),
    ("buffer.explorer_input.taskset", {"path": "d", "format": {"prompt_key": "question"}, "workflow_args": {}}),
    ("buffer.explorer_input.taskset", {"path": "d", "default_workflow_type": "agentscope_workflow_adapter_v1"}),
    ("buffer.explorer_input.eval_tasksets", []),
    ("buffer.trainer_input.experience_buffer", {"name": "x", "storage_type": "queue", "path": "q.jsonl"}),
    ("buffer.trainer_input.experience_buffer", {"capacity": 100, "max_read_timeout": 7200}),
    ("data_processor.experience_pipeline.save_input", True),
    ("explorer.max_retry_times", 0), ("explorer.max_repeat_times_per_runner", 1), ("explorer.over_rollout.ratio", 0),
    ("explorer.dynamic_timeout", {"enable": False, "ratio": 3}),
    ("explorer.rollout_model", {"engine_num": 1, "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9}),
    ("explorer.rollout_model", {"enforce_eager": False, "enable_openai_api": True, "enable_history": True}),
    ("synchronizer", {"sync_style": "fixed", "sync_method": "checkpoint", "sync_interval": 4, "sync_timeout": 9}),
    ("trainer", {"use_dynamic_bsz": True, "ulysses_sequence_parallel_size": 1, "trainer_type": "verl"}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ACCEPTED)
def test_an_accepted_key_has_no_effect(key, value):
    plain = translate()
    config = translate((key, value))
    assert config.model_copy(update={"train_dataset": None}) == plain


REFUSED = [
    ("mode", "serve", r"mode='serve'.*`tunesmith serve` with serve\.mode=online"),
    ("mode", ["serve"], r"mode=\['serve'\] is not supported: use both or colocate"),
    ("explorer.db_url", "sqlite:///a.db", r"db_url='sqlite:///a\.db'.*serve\.mode=online"),
    ("group", "g", r"group='g'.*put the group into name"),
    ("stages", [{"stage_name": "a"}], r"stages=.*one file per stage"),
    ("cluster.node_num", 4, r"cluster\.node_num=4 needs cluster\.gpu_per_node"),
    ("cluster.ray_address", "h:1", r"ray_address='h:1'.*RAY_ADDRESS"),
    ("ray_namespace", "x", r"ray_namespace='x'.*on one host"),
    ("algorithm.kl_loss_fn", "sideways", r"algorithm\.kl_estimator must be"),
    ("algorithm.kl_penalty_fn", "k1", r"kl_penalty_fn='k1'.*kl_loss_fn"),
    ("algorithm.kl_loss_fn_args", {"adaptive": True}, r"kl_loss_fn_args\.adaptive=True needs .*target_kl"),
    ("algorithm.algorithm_type", "grpo_verl", r"algorithm_type='grpo_verl'.*nearest is grpo"),
    ("algorithm.algorithm_type", "cpt", r"algorithm_type='cpt'.*nearest is sft"),
    ("algorithm.advantage_fn", "clipb", r"advantage_fn='clipb'.*nearest is clip_cov"),
    ("algorithm", {"algorithm_type": "dr_grpo", "policy_loss_fn": "gspo"}, r"policy_loss_fn='gspo'.*type='dr_grpo'"),
    ("algorithm.advantage_fn", "rec", r"advantage_fn='rec'.*'rec' combines with rec, 'ppo' with ppo, grpo"),
    ("algorithm.advantage_fn_args", {"duplicate_experiences": True}, r"duplicate_experiences=True.*refill_budget"),
    ("algorithm.rollout_correction", {"rollout_rs": "token"}, r"rollout_rs needs .*rollout_rs_threshold"),
    (
        "algorithm.rollout_correction", {"rollout_rs": "token", "rollout_rs_threshold": 0},
        r"rollout_rs needs .*rollout_rs_threshold",
    ),
    ("algorithm.rollout_correction", {"bypass_mode": True}, r"bypass_mode=True.*policy at the start of the step"),
    ("algorithm.sample_strategy", "mix", r"sample_strategy='mix'.*experience\.replay"),
    ("algorithm.rollout_correction", {"rollout_iss": 1}, r"rollout_iss is not a known key: did you mean 'rollout_is'"),
    ("buffer.batch_size", "abc", r"^buffer\.batch_size must be a whole number, got 'abc'$"),
    ("model.top_k", 1.5, r"^model\.top_k must be a whole number, got 1\.5$"),
    ("algorithm.optimizer.lr_warmup_steps_ratio", [1], r"\.lr_warmup_steps_ratio must be a number, got"),
    ("algorithm.algorithm_type", ["grpo"], r"^algorithm\.algorithm_type must be a name, got \['grpo'\]$"),
    ("buffer.explorer_input.taskset", {"rollout_args": {"top_k": ""}}, r"rollout_args\.top_k must be a whole number"),
    ("buffer.explorer_input.eval_tasksets", 1, r"^buffer\.explorer_input\.eval_tasksets must be a list, got 1$"),
    (
        "data_processor.experience_pipeline.operators", [{"name": "reward_filter", "args": 1}],
        r"operators\[0\]\.args must be a mapping of keys to values, got 1",
    ),
    ("model.lora_configs", [{"path": "a"}], r"lora_configs\[0\]\.path='a'.*set model_path to its folder"),
    ("model.lora_configs", [{}, {}], r"model\.lora_configs: one adapter is trained, got 2"),
    ("model.repetition_penalty", 1.2, r"repetition_penalty=1\.2.*cannot reproduce this distribution"),
    ("model.temprature", 1, r"model\.temprature is not a known key: did you mean 'temperature'"),
    ("buffer.train_batch_size", 100, r"train_batch_size=100.*must divide.*256.*num_minibatches"),
    ("buffer.explorer_input.taskset", {"path": "d", "storage_type": "sql"}, r"taskset\.storage_type='sql'.*jsonl"),
    ("buffer.explorer_input.taskset", {"path": "d", "rollout_args": {"n": 4}}, r"rollout_args\.n is not supported"),
    (
        "buffer.explorer_input.tasksets",
        [{"name": "a", "path": "d", "rollout_args": {"top_p": 0.9}}, {"name": "b", "path": "e"}],
        r"tasksets have different rollout_args",
    ),
    ("buffer.explorer_input.taskset", {"path": "d", "pth": 1}, r"taskset\.pth is not a known key: did you mean 'path'"),
    (
        "buffer.explorer_input.taskset", {"path": "d", "task_selector": {"selector": "random"}},
        r"task_selector\.selector is not a known key",
    ),
    (
        "buffer.explorer_input.eval_tasksets", [{"path": "d", "task_selector": {"selector_type": "random"}}],
        r"eval_tasksets\[0\]\.task_selector=.*every task once",
    ),
    (
        "buffer.explorer_input.eval_tasksets", [{"path": "a", "repeat_times": 2}, {"path": "b", "repeat_times": 3}],
        r"eval_tasksets\[1\]\.repeat_times=3: another key of the file sets evaluation\.num_samples to 2",
    ),
    ("explorer.rollout_model.enable_history", False, r"enable_history=False.*cannot be trained"),
    ("explorer.auxiliary_models", [{"name": "h"}], r"auxiliary_models\[0\] needs a model_path"),
    ("trainer.save_interval", 0, r"save_interval=0.*remove it"),
    ("trainer.trainer_config", {"a": {"b": 1}}, r"trainer_config\.a\.b=1 is not supported: set the option by its own"),
    ("monitor.monitor_type", "nothing", r"monitor\.trackers"),
    ("bufer", {}, r"bufer is not a known key: did you mean 'buffer'"),
    ("synchronizer", "x", r"synchronizer must be a mapping"),
    ("synchronizer.sync_style", "fxed", r"synchronizer\.sync_style='fxed'.*fixed, explorer_driven, trainer_driven"),
    ("synchronizer.sync_style", 3, r"synchronizer\.sync_style=3.*fixed, explorer_driven, trainer_driven, fully_async"),
    ("synchronizer.sync_method", "ncll", r"synchronizer\.sync_method='ncll'.*nccl, checkpoint or memory"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_an_unsupported_key_is_refused_with_the_reason(key, value, message):
    with pytest.raises(ConfigError, match=message):
        translate((key, value))


@pytest.mark.parametrize(
    ("style", "is_noted"),
    [
        ("fixed", False), ("FIXED", False), ("explorer_driven", False), ("dynamic_by_explorer", False), (None, False),
        ("trainer_driven", True), ("dynamic_by_trainer", True), ("fully_async", True),
    ],
)  # fmt: skip
def test_a_note_explains_styles_that_overlap_sampling_and_training(style, is_noted):
    notes = translate_trinity_file({"synchronizer": {"sync_style": style}}).notes
    assert [("a step is sampled, then trained" in note) for note in notes] == [True] * is_noted


def test_allow_neutral_accepts_only_empty_and_disabled_values():
    for value in (None, "", "none", 0, False, [], {}):
        allow_neutral("x")(None, "key", value)
    for value in (1, "x", [0], {"a": None}, True):
        with pytest.raises(ConfigError, match=r"key=.* is not supported: x"):
            allow_neutral("x")(None, "key", value)
