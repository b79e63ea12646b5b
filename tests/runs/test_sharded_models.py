"""What sharded weights exclude is refused before weights load, and ranks without vLLM have the policy's facts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from engines import TOKENIZER
from tiny_models import build_tiny
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, ModelSection, RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.vllm.engine import DistantEngine
from tunesmith.errors import ConfigError, EngineError, ModelError
from tunesmith.runs import policy
from tunesmith.runs.extra_models import check_sharded_models
from tunesmith.trainer.sharding import sharded_model
from tunesmith.types import Engine, Sampling


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {}}, "does not work with engine.kind=tunesmith, which samples from whole weights"),
        ({"model": {"lora": {}}}, "does not work with model.lora"),
        ({"model": {"residual_dtype": "float32"}}, "does not work with model.residual_dtype=float32"),
        ({"trainer": {"has_row_graphs": True}}, "does not work with trainer.has_row_graphs"),
        ({"rollout": {"assignment": "balanced"}}, "does not work with rollout.assignment=balanced"),
        (
            {"algorithm": {"kl_coef": 0.1, "reference_refresh_steps": 2}},
            "does not work with algorithm.reference_refresh_steps",
        ),
        ({"cluster": {"has_sharded_gradients": True}}, "has_sharded_gradients=true has no effect with"),
    ],
)
def test_what_does_not_work_with_sharded_weights_is_refused(settings, message):
    config = {"model": {"path": "x", "max_model_len": 64}, "engine": {"kind": "vllm"}}
    for name, section in settings.items():
        config[name] = config.get(name, {}) | section if section else {}
    config["cluster"] = {"has_sharded_weights": True} | settings.get("cluster", {})
    with pytest.raises(ValidationError, match=message) as raised:
        RunConfig.model_validate(config)
    assert len(raised.value.errors()) == 1


def test_a_critic_as_large_as_the_model_is_refused(pocket_folder):
    model = ModelSection(path=str(pocket_folder), max_model_len=64, device="cpu")
    small = AlgorithmSection(algorithm_type="ppo", critic={"path": str(pocket_folder)})
    check_sharded_models(resolve_algorithm(small), small, model)
    own = AlgorithmSection(algorithm_type="ppo")
    with pytest.raises(ConfigError, match="the critic of algorithm_type='ppo' is not sharded"):
        check_sharded_models(resolve_algorithm(own), own, model)


@pytest.mark.parametrize("is_tied", [True, False])
def test_other_ranks_untie_a_head_if_the_first_one_merged_an_adapter_of_it(pocket_folder, monkeypatch, is_tied):
    monkeypatch.setattr(policy, "shard_model", lambda *_: None)
    ranks = SimpleNamespace(is_first=False, broadcast_object=lambda _: is_tied)
    model = policy.load_sharded_model(ModelSection(path=str(pocket_folder), max_model_len=64, device="cpu"), ranks)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embeddings) == model.config.tie_word_embeddings == is_tied
    assert head.is_meta and embeddings.is_meta and head.requires_grad


def test_a_model_without_decoder_layers_is_refused(monkeypatch):
    monkeypatch.setattr(sharded_model, "GradientCheckpointingLayer", type("Layer", (), {}))
    model = build_tiny("llama")
    with pytest.raises(ModelError, match="LlamaForCausalLM has no decoder layers that cluster.has_sharded_weights"):
        sharded_model.find_decoder_layers(model, model.dtype)


def test_a_rank_without_vllm_has_the_facts_of_the_policy():
    engine = DistantEngine(build_tiny("llama"), TOKENIZER, max_model_len=64)
    typed: Engine = engine
    engine.resume(3)
    engine.pause()
    assert typed.policy_version == 3 and typed.max_model_len == 64 and typed.compute_stats() == {}
    with pytest.raises(EngineError, match="only the first rank samples with vLLM"):
        run_lockstep(engine.generate([1], Sampling(max_tokens=1)))
