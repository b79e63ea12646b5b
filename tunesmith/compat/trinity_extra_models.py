"""Rules for Trinity-RFT's keys of the critic and of expert demonstrations that are trained with the rollouts."""

from __future__ import annotations

from typing import Any

from tunesmith.compat.trinity_algorithms import find_algorithm
from tunesmith.compat.trinity_draft import Draft, Rule, accept, allow, move, read_mapping, walk
from tunesmith.errors import ConfigError

MIXTURES = ("mix", "mix_chord")
DEFAULT_DATASET = "sft_dataset"
"""The auxiliary buffer that the mix strategy reads by default."""


def move_for_critic(target: str) -> Rule:
    """Set our key if the algorithm has a critic; otherwise the key has no effect, as in Trinity-RFT."""

    def apply(draft: Draft, key: str, value: Any) -> None:
        has_critic = find_algorithm(draft) == "ppo"
        rule = move(target) if has_critic else accept("this algorithm has no critic", silent=("", 0))
        rule(draft, key, value)

    return apply


def read_sample_strategy(draft: Draft, key: str, value: Any) -> None:
    own = ("mix",) if find_algorithm(draft) in MIXTURES else ()
    allow("default", "warmup", *own, reason="a step trains the rollouts it sampled; see experience.replay")(
        draft, key, value
    )


def read_sample_strategy_args(draft: Draft, key: str, value: Any) -> None:
    """The share of expert demonstrations in a batch."""
    rules = {"expert_data_ratio": move("algorithm.expert.ratio", float), "sft_dataset_name": accept()}
    given = read_mapping(value, key)
    if given and find_algorithm(draft) not in MIXTURES:
        raise ConfigError(f"{key} is not supported: a step trains the rollouts it sampled; see experience.replay")
    walk(draft, rules, given, parent=f"{key}.")


def read_auxiliary_buffers(draft: Draft, key: str, value: Any) -> None:
    """The buffer of expert demonstrations; no other auxiliary buffer is supported."""
    expected = draft.find("algorithm.sample_strategy_args.sft_dataset_name", DEFAULT_DATASET)
    for name, section in read_mapping(value, key).items():
        if name != expected or find_algorithm(draft) not in MIXTURES:
            raise ConfigError(
                f"{key}.{name} is not supported: a step trains the rollouts it sampled; see algorithm.expert"
            )
        rules: dict[str, Rule] = {
            "name": accept(),
            "path": move("algorithm.expert.path"),
            "split": move("algorithm.expert.split"),
            "subset_name": move("algorithm.expert.name"),
            "schema_type": allow("sft", reason="expert demonstrations are conversations"),
            "storage_type": allow("file", reason="conversations are read from files and from the hub"),
            "format": accept("rows must have `messages`, and may have `tools`"),
            "total_epochs": accept("demonstrations are drawn in every step of the run"),
        }
        walk(draft, rules, read_mapping(section, f"{key}.{name}"), parent=f"{key}.{name}.")
