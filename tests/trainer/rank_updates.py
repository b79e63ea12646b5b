"""Updates on several ranks, in processes of their own, for `test_rank_updates.py`."""

from __future__ import annotations

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
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.trainer.trainer import Trainer

LABELS = [0.9, -1.1, -0.4, 1.3, 0.6, -0.8, 0.5, -0.2]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
SETTINGS = LOOSE | {"learning_rate": 1e-2, "weight_decay": 0.1, "max_tokens_per_row": 25}
ALONE = Ranks()


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
    return cases


def run_case(name: str, ranks: Ranks) -> tuple[dict[str, float], torch.Tensor, dict[str, torch.Tensor]]:
    """Metrics of the second of two steps, the weights after it, and the optimizer's state."""
    section, settings, rank_of_group = list_cases()[name]
    model, algorithm = build_trainable(), section["algorithm_type"]
    experts = (4, 5) if algorithm.startswith("mix") else ()
    samples, _ = build_off_policy(model, LABELS, GROUPS, experts=experts)
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
    metrics = trainer.step(own)
    return metrics, read_parameters(model), trainer.state_dict()["optimizer"]


def run_all(folder: Path, *, world_size: int) -> None:
    """Run every case on `world_size` ranks and save the results of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run_rank, (world_size, port, folder), nprocs=world_size)


def run_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = Place(rank=rank, world_size=world_size, local_rank=rank, address=f"127.0.0.1:{port}")
    with open_ranks(place, device=torch.device("cpu"), timeout_s=120) as ranks:
        results = {name: run_case(name, ranks) for name in list_cases()}
    torch.save(results, folder / f"{rank}.pt")
