"""Updates on several ranks, in processes of their own, for `test_rank_updates.py`."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import torch
from padded import UPDATES, build_off_policy
from test_combinations import build_extra_models
from test_trainer import LOOSE
from torch import multiprocessing

from free_ports import find_free_port
from routes import route_by_prefix
from trainable_models import build_trainable
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.cluster.process_group import open_ranks, split_ranks
from tunesmith.cluster.rank_info import RankInfo
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import AlgorithmSection, LoraSection, TrainerSection
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.trainer.sharding.sharded_model import gather_state, iter_whole_weights, shard_model
from tunesmith.trainer.trainer import Trainer

LABELS = [0.9, -1.1, -0.4, 1.3, 0.6, -0.8, 0.5, -0.2]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
SETTINGS = LOOSE | {"learning_rate": 1e-2, "weight_decay": 0.1, "max_tokens_per_row": 25}
ALONE = Ranks()
IS_COMPLETE = os.environ.get("TUNESMITH_ALL_RANKS") == "1"
"""Whether every case runs on every number of ranks, instead of each update once and a few cases on three ranks."""
ON_THREE_RANKS = (
    "grpo", "reinforceplusplus", "kl_cov", "grpo, one rank has all samples", "mix, minibatches",
    "ppo, more minibatches than groups of a rank", "ppo, sharded gradients", "grpo, adapter",
    "ppo, sharded weights", "grpo, minibatches, one rank has all samples, sharded weights",
    "grpo, corrections, sharded weights",
)  # fmt: skip
SHARDED_WEIGHTS = tuple(
    f"{name}, sharded weights"
    for name in ("grpo", "reinforceplusplus", "gspo", "kl_cov", "mix", "grpo, recomputed layers", "grpo, corrections")
)
SPLIT = (("grpo", 2), ("grpo, minibatches", 1), ("ppo, sharded gradients", 1))
"""Cases that some of three ranks train, and how many others only take weights."""
ON_TWO_RANKS = (
    *UPDATES,
    "grpo, corrections",
    "grpo, experts",
    "grpo, sharded gradients",
    "gspo, minibatches",
    *SHARDED_WEIGHTS,
)


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
    for name in ("grpo", "ppo", "reinforceplusplus", "gspo", "kl_cov", "mix"):
        cases[f"{name}, sharded weights"] = ({"algorithm_type": name}, {}, {0: 0, 1: 0, 2: 0, 3: 1})
    cases["grpo, minibatches, one rank has all samples, sharded weights"] = (
        {"algorithm_type": "grpo"}, {"num_minibatches": 2}, dict.fromkeys(range(4), 1),
    )  # fmt: skip
    cases["grpo, recomputed layers, sharded weights"] = (
        {"algorithm_type": "grpo"}, {"has_gradient_checkpointing": True}, {0: 0, 1: 1, 2: 1, 3: 1},
    )  # fmt: skip
    section = {"kl_coef": 0.1, "kl_adaptive": {"target": 1e-3, "horizon": 50}, "entropy_coef": 0.01}
    section |= {"correction": {"importance": "token", "mask": {"level": "sequence", "low": 0.5, "high": 2.0}}}
    cases["grpo, corrections"] = (
        {"algorithm_type": "grpo", **section},
        {"num_minibatches": 2},
        {0: 0, 1: 1, 2: 1, 3: 0},
    )
    cases["grpo, corrections, sharded weights"] = cases["grpo, corrections"]
    section = {"algorithm_type": "grpo"}
    cases["grpo, experts"] = (
        section, {"routing_replay": True, "router_aux_loss_coef": 0.5}, {0: 0, 1: 1, 2: 1, 3: 1},
    )  # fmt: skip
    cases["grpo, adapter"] = ({"algorithm_type": "grpo"}, {"num_minibatches": 2}, {0: 0, 1: 1, 2: 2, 3: 0})
    return cases


def is_run(name: str, num_ranks: int) -> bool:
    """Whether a case runs on that many ranks."""
    return IS_COMPLETE or name in {2: ON_TWO_RANKS, 3: ON_THREE_RANKS}[num_ranks]


@functools.cache
def load_samples(experts: tuple[int, ...], num_layers: int = 3) -> list:
    return build_off_policy(build_trainable(num_layers=num_layers), LABELS, GROUPS, experts=experts)[0]


def count_layers(name: str) -> int:
    """Layers of the policy of a case: ranks meet for each weight, and only where layers are sharded depth matters."""
    return 2 if "sharded weights" in name else 1


def build_policy(name: str) -> torch.nn.Module:
    model = build_trainable("qwen3_moe" if "experts" in name else "llama", num_layers=count_layers(name))
    if "adapter" in name:
        torch.manual_seed(0)
        lora = LoraSection(r=3, alpha=6.0, target_modules=("q_proj", "v_proj", "down_proj"))
        add_adapter(model, lora, base="base", dtype=torch.float64)
    return model


def run_case(
    name: str, ranks: Ranks, model: torch.nn.Module | None = None
) -> tuple[dict[str, float], torch.Tensor, dict[str, torch.Tensor]]:
    """Metrics of the second of two steps, the weights after it, and the optimizer's state."""
    section, settings, rank_of_group = list_cases()[name]
    model, algorithm = model or build_policy(name), section["algorithm_type"]
    samples = load_samples((4, 5) if algorithm.startswith("mix") else (), count_layers(name))
    if "experts" in name:
        samples = [*route_by_prefix(samples[:-1], num_layers=1), samples[-1]]
    own = [
        each for each in samples if ranks.is_alone or rank_of_group[each.group_index] % ranks.world_size == ranks.rank
    ]
    extra = build_extra_models(algorithm)
    if "kl_coef" in section:
        extra["reference_model"] = build_trainable(seed=1)
    if "sharded weights" in name and not ranks.is_alone:
        shard_model(model, ranks, torch.device("cpu"))
        if extra["reference_model"] is not None:
            shard_model(extra["reference_model"].requires_grad_(False), ranks, torch.device("cpu"))
    trainer = Trainer(
        model, TrainerSection(**(SETTINGS | settings)), AlgorithmSection(**section),
        max_model_len=64, num_total_steps=9, ranks=ranks, has_sharded_gradients="sharded gradients" in name, **extra,
    )  # fmt: skip
    trainer.step(own)
    met: list[list[int]] = []
    metrics = trainer.step(own, host_work=[lambda: met.append(ranks.all_gather_objects(ranks.rank)), lambda: None])
    assert met == [list(range(ranks.world_size))], "ranks meet during the update"
    trainer.take_times()
    critics = [] if trainer._critic is None else [trainer._critic.optimizer]
    optimizers = [trainer._optimizer, *critics]
    assert ranks.is_alone or not any(each._times._intervals for each in optimizers), "times of updates pile up"
    weights = torch.cat([weight.flatten() for _, weight in iter_whole_weights(model)])
    return metrics, weights, trainer.state_dict()["optimizer"]


def run_narrow(ranks: Ranks, *, is_sharded: bool = True) -> dict[str, object]:
    """Two updates of a model with 16-bit weights; what it hands on before and after, its state, and its warnings."""
    model = build_trainable(dtype=torch.bfloat16)
    samples = [each for each in load_samples(()) if ranks.is_alone or each.group_index % ranks.world_size == ranks.rank]
    if not ranks.is_alone and is_sharded:
        model = model.to("meta") if not ranks.is_first else model
        shard_model(model, ranks, torch.device("cpu"))
    settings = TrainerSection(**(SETTINGS | {"mismatch_stop": 1e9, "mismatch_warn": 1e-30}))
    section = AlgorithmSection(algorithm_type="reinforceplusplus")
    trainer = Trainer(
        model, settings, section, max_model_len=64, num_total_steps=9, ranks=ranks, has_sharded_gradients=True
    )
    before = {name: weight.clone() for name, weight in iter_whole_weights(model)}
    masters = {name: part.dtype for name, part in trainer._optimizer._masters.items()}
    warnings: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = warnings.append
    logging.getLogger("tunesmith.trainer.metrics").addHandler(handler)
    trainer.step(samples)
    trainer.step(samples)
    logging.getLogger("tunesmith.trainer.metrics").removeHandler(handler)
    state = trainer.state_dict()["optimizer"]
    after = {name: weight.clone() for name, weight in iter_whole_weights(model)}
    saved = gather_state(model)
    found = {"before": before, "after": after, "saved": saved, "state": state, "masters": masters}
    return found | {"num_warnings": len(warnings)}


def run_resumed(ranks: Ranks, *, is_sharded: bool = False) -> dict[str, object]:
    """A step of a run that one rank began and that resumes here: what it hands on, and its times before the step."""
    samples = load_samples((), num_layers=2)
    section = AlgorithmSection(algorithm_type="grpo")
    settings = TrainerSection(**(SETTINGS | {"schedule": "cosine", "warmup_steps": 2, "num_minibatches": 2}))
    options = {"max_model_len": 64, "num_total_steps": 5}
    began = Trainer(build_trainable(num_layers=2), settings, section, **options)
    for _ in range(3):
        began.step(samples)
    model = build_trainable(num_layers=2, seed=1)
    model.load_state_dict(began.model.state_dict())
    if is_sharded and not ranks.is_alone:
        shard_model(model, ranks, torch.device("cpu"))
    trainer = Trainer(model, settings, section, ranks=ranks, **options)
    trainer.load_state_dict(began.state_dict())
    times = trainer.take_times()
    own = [each for each in samples if ranks.is_alone or each.group_index % ranks.world_size == ranks.rank]
    metrics = trainer.step(own)
    weights = torch.cat([weight.flatten() for _, weight in iter_whole_weights(model)])
    state = trainer.state_dict()["optimizer"]
    return {"times": times, "metrics": metrics, "weights": weights, "state": state}


def run_split(name: str, world: Ranks, num_samplers: int) -> torch.Tensor:
    """The weights after a case that the last ranks do not train, but take from the first one."""
    roles = split_ranks(world, num_samplers=num_samplers, timeout_s=120)
    model = build_policy(name)
    if roles.is_sampler:
        model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()}, strict=False)
    else:
        run_case(name, roles.trainers, model)
    if roles.is_sampler or world.is_first:
        roles.send_weights(list(model.parameters()))
    return torch.cat([weight.flatten() for _, weight in iter_whole_weights(model)])


def run_all(folder: Path) -> None:
    """Run the cases on three ranks, then on two of them, and save the results of each rank. Forks this process."""
    ports = {num_ranks: find_free_port() for num_ranks in (3, 2)}
    multiprocessing.start_processes(run_rank, (ports, folder), nprocs=3, start_method="fork")


def run_rank(rank: int, ports: dict[int, int], folder: Path) -> None:
    torch.set_num_threads(1)
    for num_ranks, port in ports.items():
        if rank >= num_ranks:
            return
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        place = RankInfo(rank=rank, world_size=num_ranks, local_rank=rank, address=f"127.0.0.1:{port}")
        with open_ranks(place, device=torch.device("cpu"), timeout_s=120) as ranks:
            results: dict = {name: run_case(name, ranks) for name in list_cases() if is_run(name, num_ranks)}
            results["resumed"] = run_resumed(ranks)
            results["resumed, sharded weights"] = run_resumed(ranks, is_sharded=True)
            results["narrow"] = run_narrow(ranks)
            results["narrow, whole weights"] = run_narrow(ranks, is_sharded=False)
            if num_ranks == 3:
                results |= {f"{name}, {n} sample": run_split(name, ranks, n) for name, n in SPLIT}
        torch.save(results, folder / f"{rank} of {num_ranks}.pt")
