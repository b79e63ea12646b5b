"""Extra models keep their residual stream in the type that the policy uses."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Olmo2Config

from trainable_models import read_residual_types
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, AuxiliaryModelSection, CriticSection, ModelSection, TeacherSection
from tunesmith.errors import ConfigError, ModelError
from tunesmith.model.adapters.adapter import disabled_adapter
from tunesmith.model.load import load_model, load_section_model
from tunesmith.runs.extra_models import check_extra_models, check_reference, load_extra_models
from tunesmith.runs.policy import check_auxiliary


def build_section(path: str, residual_dtype: str) -> ModelSection:
    return ModelSection(path=path, device="cpu", dtype="bfloat16", max_model_len=64, residual_dtype=residual_dtype)


@pytest.mark.parametrize(("residual_dtype", "expected"), [("model", torch.bfloat16), ("float32", torch.float32)])
def test_extra_models_use_the_residual_type_of_the_policy(pocket_folder, residual_dtype, expected):
    section = build_section(pocket_folder, residual_dtype)
    policy = load_section_model(section)
    assert read_residual_types(policy.get_decoder()) == {expected}
    for settings in (
        AlgorithmSection(algorithm_type="grpo", kl_coef=0.1),
        AlgorithmSection(algorithm_type="jsd", teacher=TeacherSection(path=pocket_folder)),
        AlgorithmSection(algorithm_type="ppo"),
    ):
        found = load_extra_models(resolve_algorithm(settings), settings, section, policy=policy)
        others = [one.get_decoder() for one in (found.reference, found.teacher) if one is not None]
        others += [] if found.critic is None else [found.critic.body]
        assert others
        assert all(read_residual_types(other) == {expected} for other in others)


def test_an_extra_model_without_float32_residuals_is_refused_before_it_loads(pocket_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(pocket_folder)
    tokenizer.save_pretrained(tmp_path)
    Olmo2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(tmp_path)
    settings = AlgorithmSection(algorithm_type="ppo", critic=CriticSection(path=str(tmp_path)))
    algorithm = resolve_algorithm(settings)
    check_extra_models(algorithm, settings, build_section(pocket_folder, "model"))
    with pytest.raises(ModelError, match=r"^algorithm\.critic: model\.residual_dtype=float32 is not supported"):
        check_extra_models(algorithm, settings, build_section(pocket_folder, "float32"))


def test_errors_of_other_models_name_their_own_keys(pocket_folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    other = "nobody/model.path"
    with pytest.raises(ModelError, match=rf"^auxiliary_models\.judge\.path='{other}' is not a local folder, and it"):
        check_auxiliary("auxiliary_models.judge", AuxiliaryModelSection(path=other))
    with pytest.raises(
        ModelError, match=r"^auxiliary_models\.judge\.max_model_len=99999999 is longer than the model's"
    ):
        check_auxiliary("auxiliary_models.judge", AuxiliaryModelSection(path=pocket_folder, max_model_len=99999999))
    settings = AlgorithmSection(algorithm_type="jsd", teacher=TeacherSection(path=other))
    with pytest.raises(ModelError, match=rf"^algorithm\.teacher\.path='{other}' is not a local folder"):
        check_extra_models(resolve_algorithm(settings), settings, build_section(pocket_folder, "model"))


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [({"bias": "all"}, True), ({"init_lora_weights": "pissa_niter_4"}, True), ({"init_lora_weights": "olora"}, True),
     ({"init_lora_weights": "gaussian"}, False), ({"use_rslora": True}, False), ({}, False)],
)  # fmt: skip
def test_an_adapter_that_changes_its_base_has_no_reference(pocket_folder, tmp_path, settings, is_refused):
    """Scores without the adapter are the base's unless it is refused."""
    base = load_model(pocket_folder, dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = base(ids).logits
    peft_model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **settings))
    peft_model.save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), base_path=pocket_folder, device="cpu", max_model_len=64, lora={})
    for kl_coef, refused in ((0.1, is_refused), (0.0, False)):
        algorithm = resolve_algorithm(AlgorithmSection(algorithm_type="grpo", kl_coef=kl_coef))
        with pytest.raises(ConfigError, match="cannot be the reference") if refused else nullcontext():
            check_reference(algorithm, section)
        check_reference(algorithm, section.model_copy(update={"lora": None}))  # merged, with a whole reference
    if not is_refused:
        policy = load_section_model(section)
        with torch.no_grad(), disabled_adapter(policy):
            assert (policy(ids).logits == expected).all()
