"""Runs of algorithms that need a critic, a teacher, experts or greedy baselines, and the settings they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from small_pocket import write_small_pocket
from small_runs import ask, judge_letters, list_apples, write_splits
from tunesmith import JudgeOutput
from tunesmith.commands.tune.tune import run_tuning
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError, DataError, ModelError
from tunesmith.experience.store import load_rollouts
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.runs.load_config import load_section


@pytest.fixture
def run(tmp_path, pocket_folder):
    """Trains for two steps with an algorithm and overrides; returns the result."""
    write_splits(tmp_path, list_apples(6))
    experts = [
        {
            "messages": [
                {"role": "user", "content": f"Tom has {n} apples. How many?"},
                {"role": "assistant", "content": f"The answer is {n}."},
            ]
        }
        for n in range(5)
    ]
    (tmp_path / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in experts))

    def call(algorithm_type, *overrides, judge=judge_letters):
        settings = [
            f"algorithm.algorithm_type={algorithm_type}", f"model.path={pocket_folder}", "model.max_model_len=128",
            "model.max_tokens=6", "model.device=cpu", f"train_dataset.path={tmp_path / 'train.jsonl'}", "name=x",
            "algorithm.batch_size=2", "algorithm.group_size=3", f"checkpoint_root_dir={tmp_path / 'runs'}",
            "engine.kv_cache_tokens=8192", "trainer.learning_rate=1e-3", "total_steps=2", "save_interval_steps=1",
            "monitor.trackers=[]", "monitor.has_progress=false",
        ]  # fmt: skip
        config = load_section(RunConfig, None, [*settings, *overrides])
        return run_tuning(config, workflow=ask, judge=judge, build_model=ChatModel)

    return call


def read_metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


EXTRA_SETTINGS = {
    "ppo": ["algorithm.critic.learning_rate=1e-3"],
    "reinforceplusplus": ["algorithm.terms_args.reward_kl_coef=0.01"],
    "grpo": ["algorithm.kl_coef=0.1", "algorithm.reference_refresh_steps=1"],
    "remax": [],
    "mix": ["algorithm.expert.path={experts}"],
    "mix_chord": ["algorithm.expert.path={experts}", "algorithm.terms_args={{mu_peak: 0.5, mu_warmup_steps: 3}}"],
    "on_policy_distill": ["algorithm.teacher.path={teacher}"],
    "jsd": ["algorithm.teacher.path={teacher}"],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_small_pocket(tmp_path_factory.mktemp("teacher") / "pocket")


@pytest.mark.parametrize("name", EXTRA_SETTINGS)
def test_a_stopped_run_resumes_to_the_same_metrics(run, tmp_path, teacher, name):
    extra = [each.format(experts=tmp_path / "experts.jsonl", teacher=teacher) for each in EXTRA_SETTINGS[name]]
    whole = run(name, *extra, "name=whole", "total_steps=2")
    run(name, *extra, "name=cut", "total_steps=1")
    resumed = run(name, *extra, "name=cut", "total_steps=2", "continue_from_checkpoint=true")
    assert read_metrics(resumed.folder) == read_metrics(whole.folder)
    expected, found = read_weights(whole.checkpoint), read_weights(resumed.checkpoint)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert whole.metrics["train/grad_norm"] > 0
    assert whole.metrics["mismatch/max_log_ratio"] < 1e-4


def test_a_refreshed_reference_of_an_adapter_resumes_to_the_same_metrics(run):
    settings = ["algorithm.kl_coef=0.1", "algorithm.reference_refresh_steps=2", "model.lora.r=2"]
    whole = run("grpo", *settings, "name=whole", "total_steps=4")
    run("grpo", *settings, "name=cut", "total_steps=3")
    resumed = run("grpo", *settings, "name=cut", "total_steps=4", "continue_from_checkpoint=true")
    rows = read_metrics(whole.folder)
    assert read_metrics(resumed.folder) == rows
    assert [row["train/reference_step"] for row in rows] == [0, 0, 2, 2]
    assert rows[1]["train/kl"] > 0 < rows[3]["train/kl"]
    assert rows[2]["train/kl"] < 1e-9


def test_gdpo_trains_on_the_metrics_of_the_judge(run):
    async def judge(task, response):
        parts = {"letters": float(sum(map(ord, response)) % 7), "length": float(len(response))}
        return JudgeOutput(reward=1.0, metrics=parts)

    weights = "algorithm.advantage_args.rewards={letters: 1.0, length: -0.1}"
    metrics = run("gdpo", weights, judge=judge).metrics
    assert metrics["algorithm/num_trained_groups"] == 2  # although every reward is 1
    assert metrics["train/grad_norm"] > 0
    with pytest.raises(ConfigError, match=r"names 'words', but the judge .* \(it has letters, length\)"):
        run("gdpo", "algorithm.advantage_args.rewards={words: 1.0}", "name=other", judge=judge)


def test_ppo_reports_its_critic_and_saves_it(run):
    result = run("ppo", "algorithm.critic.learning_rate=1e-3", "algorithm.critic.num_epochs=3")
    first, second = read_metrics(result.folder)
    assert (first["critic/value_mean"], first["critic/explained_variance"]) == (0, pytest.approx(0, abs=1e-9))
    assert second["critic/value_mean"] != 0
    assert first["critic/return_mean"] > 0
    state = torch.load(result.checkpoint / "trainer/state.pt", weights_only=True)
    assert state["critic"]["model"]["head.weight"].abs().sum() > 0
    assert not any(name.startswith("head.") for name in read_weights(result.checkpoint))


def test_the_greedy_rollout_of_remax_is_only_a_baseline(run):
    result = run("remax", "total_steps=1", "algorithm.group_size=2")
    (metrics,) = read_metrics(result.folder)
    assert metrics["rollout/num_trajectories"] == 4
    assert metrics["rollout/num_failed_baselines"] == 0
    groups = load_rollouts(result.folder / "rollouts/step_000001.parquet")
    assert [len(group.trajectories) for group in groups] == [2, 2]
    baselines = [group.baseline_reward for group in groups]
    assert metrics["rollout/baseline_reward_mean"] == sum(baselines) / 2
    assert {t.distribution.temperature for g in groups for r in g.trajectories for t in r.turns} == {1.0}
    advantages = [t.reward - group.baseline_reward for group in groups for t in group.trajectories]
    assert any(advantages)


def test_remax_works_with_groups_of_one(run):
    assert run("remax", "algorithm.group_size=1").metrics["train/num_trained_tokens"] > 0


def test_a_failed_greedy_rollout_excludes_its_group(run):
    calls = {}

    async def judge(task, response):
        calls[task["question"]] = calls.get(task["question"], 0) + 1
        if calls[task["question"]] > 3:
            raise RuntimeError("no")
        return await judge_letters(task, response)

    metrics = run("remax", "total_steps=1", judge=judge).metrics
    assert metrics["rollout/num_failed_baselines"] == 2
    assert metrics["rollout/num_failed"] == 0
    assert metrics["algorithm/num_dropped_groups"] == 2
    assert metrics["train/num_trained_tokens"] == 0


def test_the_policy_as_its_own_teacher_has_zero_kl(run, pocket_folder):
    result = run("on_policy_distill", f"algorithm.teacher.path={pocket_folder}", "total_steps=1")
    assert result.metrics["distillation/reverse_kl"] == pytest.approx(0, abs=1e-5)
    assert result.metrics["train/grad_norm"] < 1e-3


def test_experts_are_mixed_in_their_ratio(run, tmp_path):
    expert = f"algorithm.expert.path={tmp_path / 'experts.jsonl'}"
    result = run("mix", expert, "algorithm.expert.ratio=0.25", "total_steps=1")
    assert result.metrics["expert/num_sequences"] == 2
    assert result.metrics["expert/mu"] == 0.1
    again = run("mix", expert, "trainer.num_minibatches=2", "name=again")
    assert again.metrics["expert/num_sequences"] == 6
    assert again.metrics["train/num_trained_tokens"] > again.metrics["expert/num_tokens"]


@pytest.mark.parametrize(
    ("name", "overrides", "error", "message"),
    [
        ("jsd", [], ConfigError, "'jsd' needs algorithm.teacher.path"),
        ("mix", [], ConfigError, "'mix' needs algorithm.expert.path"),
        ("gdpo", [], ConfigError, "'gdpo' needs algorithm.advantage_args.rewards: the metrics of the judge"),
        ("pass_at_k", [], ConfigError, "k=4 of 'pass_at_k' must be below algorithm.group_size=3"),
        ("grpo", ["algorithm.reference_refresh_steps=5"], ConfigError, "reference_refresh_steps=5 has no effect"),
        ("grpo", ["algorithm.teacher.path=x"], ConfigError, "algorithm.teacher has no effect"),
        ("grpo", ["algorithm.expert.path=x"], ConfigError, "algorithm.expert has no effect"),
        ("grpo", ["algorithm.critic.learning_rate=1"], ConfigError, "algorithm.critic has no effect"),
        ("ppo", ["algorithm.critic.path=nowhere/x/y"], ModelError, "algorithm.critic.path=.*there is no such folder"),
        ("ppo", ["algorithm.terms_args.lambda=1"], ConfigError, "unknown argument 'lambda'.*did you mean 'lam'"),
        ("jsd", ["algorithm.teacher.path=nowhere/x/y"], ModelError, "algorithm.teacher.path=.*no such folder"),
        ("mix", ["algorithm.expert.path=nowhere.jsonl"], DataError, "nowhere"),
        ("dpo", [], ConfigError, "does not train on rewards"),
        ("dpo", ["algorithm.loss_aggregation=token-mean"], ConfigError, "whose loss includes the token weights"),
    ],
)
def test_missing_and_ineffective_settings_are_refused_before_a_model_loads(
    run, tmp_path, name, overrides, error, message
):
    with pytest.raises(error, match=message):
        run(name, *overrides)
    assert not (tmp_path / "runs").exists()


def test_a_teacher_of_another_vocabulary_is_refused(run, tmp_path, teacher):
    from transformers import AutoTokenizer

    other = tmp_path / "other"
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(other)
    (other / "config.json").write_text((Path(teacher) / "config.json").read_text())
    with pytest.raises(ConfigError, match="1 tokens differ, such as 'zebra'"):
        run("jsd", f"algorithm.teacher.path={other}")
