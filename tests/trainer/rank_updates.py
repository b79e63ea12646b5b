"""Updates on several ranks, in processes of their own, for `test_rank_updates.py`."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import torch
from padded import build_off_policy
from test_combinations import build_extra_models
from test_trainer import LOOSE, read_parameters
from torch import multiprocessing

from trainable_models import build_trainable
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.cluster.place import Place
from tunesmith.cluster.process_group import open_ranks
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import AlgorithmSection, LoraSection, TrainerSection
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.trainer.trainer import Trainer

LABELS = [0.9, -1.1, -0.4, 1.3, 0.6, -0.8, 0.5, -0.2]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
SETTINGS = LOOSE | {"learning_rate": 1e-2, "weight_decay": 0.1, "max_tokens_per_row": 25}
ALONE = Ranks()
IS_COMPLETE = os.environ.get("TUNESMITH_ALL_RANKS") == "1"
"""Whether every case runs on every number of ranks, instead of each algorithm once and a few cases on three ranks."""
ON_THREE_RANKS = (
    "grpo", "reinforceplusplus", "kl_cov", "grpo, one rank has all samples", "mix, minibatches",
    "ppo, more minibatches than groups of a rank", "ppo, sharded gradients", "grpo, adapter",
)  # fmt: skip
ON_TWO_RANKS = (*ALGORITHMS, "grpo, corrections", "grpo, sharded gradients", "gspo, minibatches")


def list_cases() -> dict[str, tuple[dict, dict, dict[int, int]]]:
    """Algorithm, trainer settings, and the rank of each group, by name. Ranks beyond the last one wrap around."""
    cases = {name: ({"algorithm_type": name}, {}, {0: 0, 1: 1, 2: 2, 3: 0}) for name in ALGORITHMS}
    for name in ("grpo", "dapo", "gspo", "ppo", "reinforceplusplus", "mix", "kl_cov", "on_policy_distill"):
        cases[f"{name}, one rank has all samples"] = ({"algorithm_type": name}, {}, dict.fromkeys(range(4), 1))
        cases[f"{name}, minibatches"] = (
            {"algorithm_type": name}, {"num_minibatches": 2}, {0: 0, 1: 1, 2: 0, 3: 1},
        )  # fmt: skip
        cases[f"{name}, more minibatches than groups of a rank"] = (
            {"algorithm_type": name}, {"num_minibatches": 4}, {0: 0, 1: 2, 2: 1, 3: 1},
        )  # fmt: skip
    for name in ("grpo", "ppo", "mix"):
        cases[f"{name}, sharded gradients"] = (
            {"algorithm_type": name}, {"num_minibatches": 2}, {0: 0, 1: 0, 2: 0, 3: 1},
        )  # fmt: skip
    section = {"kl_coef": 0.1, "kl_adaptive": {"target": 1e-3, "horizon": 50}, "entropy_coef": 0.01}
    section |= {"correction": {"importance": "token", "mask": {"level": "sequence", "low": 0.5, "high": 2.0}}}
    cases["grpo, corrections"] = (
        {"algorithm_type": "grpo", **section},
        {"num_minibatches": 2},
        {0: 0, 1: 1, 2: 1, 3: 0},
    )
    cases["grpo, adapter"] = ({"algorithm_type": "grpo"}, {"num_minibatches": 2}, {0: 0, 1: 1, 2: 2, 3: 0})
    return cases


def is_run(name: str, num_ranks: int) -> bool:
    """Whether a case runs on that many ranks."""
    return IS_COMPLETE or name in {2: ON_TWO_RANKS, 3: ON_THREE_RANKS}[num_ranks]


@functools.cache
def load_samples(experts: tuple[int, ...]) -> list:
    return build_off_policy(build_trainable(), LABELS, GROUPS, experts=experts)[0]


def build_policy(name: str) -> torch.nn.Module:
    model = build_trainable()
    if "adapter" in name:
        torch.manual_seed(0)
        lora = LoraSection(r=3, alpha=6.0, target_modules=("q_proj", "v_proj", "down_proj"))
        add_adapter(model, lora, base="base", dtype=torch.float64)
    return model


def run_case(name: str, ranks: Ranks) -> tuple[dict[str, float], torch.Tensor, dict[str, torch.Tensor]]:
    """Metrics of the second of two steps, the weights after it, and the optimizer's state."""
    section, settings, rank_of_group = list_cases()[name]
    model, algorithm = build_policy(name), section["algorithm_type"]
    samples = load_samples((4, 5) if algorithm.startswith("mix") else ())
    own = [
        each for each in samples if ranks.is_alone or rank_of_group[each.group_index] % ranks.world_size == ranks.rank
    ]
    extra = build_extra_models(algorithm)
    if "kl_coef" in section:
        extra["reference_model"] = build_trainable(seed=1)
    trainer = Trainer(
        model, TrainerSection(**(SETTINGS | settings)), AlgorithmSection(**section),
        max_model_len=64, num_total_steps=9, ranks=ranks, has_sharded_gradients="sharded" in name, **extra,
    )  # fmt: skip
    trainer.step(own)
    met: list[list[int]] = []
    metrics = trainer.step(own, beside=[lambda: met.append(ranks.all_gather_objects(ranks.rank)), lambda: None])
    assert met == [list(range(ranks.world_size))], "ranks meet beside the update"
    return metrics, read_parameters(model), trainer.state_dict()["optimizer"]


def run_all(folder: Path) -> None:
    """Run the cases on three ranks, then on two of them, and save the results of each rank."""
    ports = {}
    with socket.socket() as one, socket.socket() as other:
        for num_ranks, free in ((3, one), (2, other)):
            free.bind(("127.0.0.1", 0))
            ports[num_ranks] = free.getsockname()[1]
    multiprocessing.spawn(run_rank, (ports, folder), nprocs=3)


def run_rank(rank: int, ports: dict[int, int], folder: Path) -> None:
    torch.set_num_threads(1)
    for num_ranks, port in ports.items():
        if rank >= num_ranks:
            return
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        place = Place(rank=rank, world_size=num_ranks, local_rank=rank, address=f"127.0.0.1:{port}")
        with open_ranks(place, device=torch.device("cpu"), timeout_s=120) as ranks:
            results = {name: run_case(name, ranks) for name in list_cases() if is_run(name, num_ranks)}
        torch.save(results, folder / f"{rank} of {num_ranks}.pt")
