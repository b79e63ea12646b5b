"""Runs on a mixture of experts whose routes are recorded and replayed."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PhimoeConfig

from small_runs import build_small_run, list_apples, write_splits
from tiny_models import SIZES, get_config
from tunesmith import DatasetConfig, WorkflowOutput
from tunesmith.config import ModelSection, TrainerSection
from tunesmith.errors import ConfigError
from tunesmith.model.pocket import build_pocket_tokenizer
from tunesmith.rollout.recording.replay import RecordedChoice
from tunesmith.runs.policy import check_trained_model
from tunesmith.types import Completion, Turn

REPLAY = ("trainer.routing_replay=true", "save_interval_steps=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("mixture")
    tokenizer, config = build_pocket_tokenizer(), get_config("qwen3_moe")
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    config.max_position_embeddings, config.num_hidden_layers = 512, 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


async def ask_twice(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    first = await model(messages)
    messages += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
    second = await model(messages)
    return WorkflowOutput(response=second.choices[0].message.content)


def read_metrics(result) -> list[dict[str, float]]:
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")} for line in lines]


def test_all_tokens_of_two_turns_have_routes_and_a_resumed_run_has_the_same_bits(folder, tmp_path):
    data = write_splits(tmp_path, list_apples(4))
    run = build_small_run(
        tmp_path, str(folder), data, *REPLAY, "trainer.router_aux_loss_coef=0.01", workflow_func=ask_twice, steps=3
    )
    result = run()
    metrics = read_metrics(result)
    for step in metrics:
        assert step["routing/unrecorded"] == step["routing/changed"] == 0 and step["mismatch/kl"] < 1e-9
        assert step["routing/balance_loss"] > 1
    weights = AutoModelForCausalLM.from_pretrained(result.checkpoint).state_dict()
    resumed = run("continue_from_checkpoint=true", "resume_from_step=1")
    assert read_metrics(resumed) == metrics
    again = AutoModelForCausalLM.from_pretrained(resumed.checkpoint).state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_groups_of_the_replay_buffer_are_routed_by_the_trainer_also_after_a_resume(folder, tmp_path):
    settings = ("experience.replay.num_groups=1", "experience.replay.max_staleness=5")
    run = build_small_run(tmp_path, str(folder), write_splits(tmp_path, list_apples(4)), *REPLAY, *settings, steps=3)
    metrics = read_metrics(run())
    assert metrics[0]["routing/unrecorded"] == 0 and all(0 < step["routing/unrecorded"] < 1 for step in metrics[1:])
    assert read_metrics(run("continue_from_checkpoint=true", "resume_from_step=1")) == metrics


def test_rollouts_in_flight_keep_their_routes(folder, tmp_path):
    run = build_small_run(tmp_path, str(folder), write_splits(tmp_path, list_apples(4)), *REPLAY, steps=3)
    metrics = read_metrics(run("rollout.max_staleness=1", workflow_func=ask_twice))
    assert max(step["staleness/max"] for step in metrics) == 1
    assert all(step["routing/unrecorded"] == 0 for step in metrics)


def count_routes() -> int:
    """Turns and completions with routes that something refers to."""
    gc.collect()
    return sum(isinstance(each, Turn | Completion) and each.routes is not None for each in gc.get_objects())


def test_routes_live_until_a_step_has_trained_them_and_evaluations_keep_none(folder, tmp_path):
    counts, data = [], write_splits(tmp_path, list_apples(4))

    async def ask_counted(task, model):
        counts.append(count_routes())
        return await ask_twice(task, model)

    run = build_small_run(tmp_path, str(folder), data, *REPLAY, workflow_func=ask_counted)
    run("rollout.max_concurrency=1", "evaluation.interval_steps=1", eval_dataset=DatasetConfig(path=data, split="test"))
    training, evaluation = list(range(0, 16, 2)), [0] * 4
    assert counts == [*training, *evaluation] * 2


def test_branches_receive_the_routes_of_their_parent_and_a_record_holds_each_once(folder, tmp_path):
    counts, data = [], write_splits(tmp_path, list_apples(4))

    async def ask_counted(task, model):
        output = await ask_twice(task, model)
        counts.append((count_routes(), sum(isinstance(each, RecordedChoice) for each in gc.get_objects())))
        return output

    branching = ("initial_rollouts=2", "base_probability=1.0")
    run = build_small_run(tmp_path, str(folder), data, *REPLAY, workflow_func=ask_counted, steps=1)
    (metrics,) = read_metrics(run(*(f"rollout.branching.{each}" for each in branching)))
    assert metrics["routing/unrecorded"] == metrics["routing/changed"] == 0 and metrics["mismatch/kl"] < 1e-9
    assert metrics["rollout/num_branched_rollouts"] > 0
    assert max(num_choices for _, num_choices in counts) > 4
    assert max(num_routes for num_routes, _ in counts) <= 16, "8 rollouts of two turns"


def test_replay_is_refused_for_routers_that_do_not_choose_the_largest_scores(tmp_path):
    tokenizer = build_pocket_tokenizer()
    config = PhimoeConfig(**SIZES | {"vocab_size": len(tokenizer)}, num_local_experts=4)
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), device="cpu", max_model_len=64)
    check_trained_model(section, TrainerSection(router_aux_loss_coef=0.1))
    with pytest.raises(ConfigError, match="routing_replay does not support models of type 'phimoe': leave it out"):
        check_trained_model(section, TrainerSection(routing_replay=True))


@pytest.mark.parametrize("setting", ["trainer.routing_replay=true", "trainer.router_aux_loss_coef=0.1"])
def test_knobs_of_routers_are_refused_for_a_dense_model(setting, pocket_folder, tmp_path):
    run = build_small_run(tmp_path, str(pocket_folder), write_splits(tmp_path, list_apples(2)))
    with pytest.raises(
        ConfigError, match=f"{setting.partition('=')[0]} does not support models of type 'llama': leave"
    ):
        run(setting)


CONFIGURATION = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_modeling_code_of_the_models_own_is_checked_too(pocket_folder, tmp_path):
    shutil.copytree(pocket_folder, tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text()) | {"model_type": "own_llama"}
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }  # fmt: skip
    for name, text in {
        "config.json": json.dumps(config), "configuration_own.py": CONFIGURATION, "modeling_own.py": MODELING,
    }.items():  # fmt: skip
        (tmp_path / "own" / name).write_text(text)
    section = ModelSection(path=str(tmp_path / "own"), max_model_len=64, trust_remote_code=True)
    check_trained_model(section, TrainerSection())
    with pytest.raises(ConfigError, match="routing_replay does not support models of type 'own_llama'"):
        check_trained_model(section, TrainerSection(routing_replay=True))
