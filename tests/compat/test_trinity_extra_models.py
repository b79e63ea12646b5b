"""Trinity-RFT's keys of the critic and of expert demonstrations."""

from __future__ import annotations

import pytest

from tunesmith.compat.trinity_yaml import translate_trinity_file
from tunesmith.config import AlgorithmSection, CriticSection, ExpertSection
from tunesmith.errors import ConfigError

BUFFER = {"schema_type": "sft", "storage_type": "file", "path": "data/experts", "split": "train", "format": {}}


def read(algorithm, *, model=None, trainer=None, buffers=None) -> AlgorithmSection:
    values = {"mode": "both", "algorithm": algorithm, "model": model or {}, "trainer": trainer or {}}
    if buffers is not None:
        values["buffer"] = {"trainer_input": {"auxiliary_buffers": buffers}}
    return AlgorithmSection(**translate_trinity_file(values).values.get("algorithm", {}))


def test_the_critic_of_ppo_has_its_model_and_warmup():
    section = read({"algorithm_type": "ppo"}, model={"critic_model_path": "c"}, trainer={"critic_warmup": 5})
    assert section.critic == CriticSection(path="c", warmup_steps=5)
    plain = read({"algorithm_type": "grpo"}, model={"critic_model_path": "c"}, trainer={"critic_warmup": 5})
    assert plain.critic == CriticSection()


def test_expert_demonstrations_are_an_auxiliary_buffer():
    section = read(
        {
            "algorithm_type": "mix_chord",
            "sample_strategy": "mix",
            "sample_strategy_args": {"expert_data_ratio": 0.2, "sft_dataset_name": "mine"},
            "policy_loss_fn_args": {"mu_peak": 0.9, "mu_warmup_steps": 10},
        },
        buffers={"mine": BUFFER},
    )
    assert section.expert == ExpertSection(path="data/experts", split="train", ratio=0.2)
    assert section.terms_args == {"mu_peak": 0.9, "mu_warmup_steps": 10, "mu_decay_steps": 1}
    assert read({"algorithm_type": "mix"}, buffers={"sft_dataset": BUFFER}).expert.path == "data/experts"


@pytest.mark.parametrize(
    ("algorithm", "buffers", "message"),
    [
        ({"algorithm_type": "mix"}, {"other": BUFFER}, r"auxiliary_buffers\.other is not supported"),
        ({"algorithm_type": "grpo"}, {"sft_dataset": BUFFER}, r"auxiliary_buffers\.sft_dataset is not supported"),
        ({"algorithm_type": "mix"}, {"sft_dataset": BUFFER | {"schema_type": "dpo"}}, "schema_type='dpo'"),
        ({"algorithm_type": "mix"}, {"sft_dataset": {"paths": "x"}}, "paths is not a known key"),
        ({"algorithm_type": "grpo", "sample_strategy": "mix"}, None, "sample_strategy='mix'"),
        ({"algorithm_type": "grpo", "sample_strategy_args": {"expert_data_ratio": 0.5}}, None, "sample_strategy_args"),
    ],
)
def test_unsupported_buffers_and_strategies_are_refused(algorithm, buffers, message):
    with pytest.raises(ConfigError, match=message):
        read(algorithm, buffers=buffers)
