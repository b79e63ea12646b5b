"""Sharded weights on two GPUs make the updates of whole ones."""

from __future__ import annotations

import os

import pytest
import torch
from test_trainer_gpu import build_samples
from torch import multiprocessing

from free_ports import find_free_port
from trainable_models import build_deep
from tunesmith.cluster.process_group import open_ranks
from tunesmith.cluster.rank_info import RankInfo
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.trainer.sharding.sharded_model import iter_whole_weights, shard_model
from tunesmith.trainer.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def train(ranks, *, is_sharded):
    model = build_deep("qwen3")
    if is_sharded:
        shard_model(model, ranks, ranks.device)
    else:
        model.to(ranks.device)
    settings = TrainerSection(
        learning_rate=1e-3,
        max_tokens_per_row=400,
        has_compiled_layers=False,
        max_grad_norm=1e9,
        mismatch_stop=1e9,
        mismatch_warn=1e9,
    )
    trainer = Trainer(
        model, settings, AlgorithmSection(algorithm_type="reinforce", kl_coef=0.0), max_model_len=256,
        num_total_steps=9, ranks=ranks, has_sharded_gradients=None if is_sharded else True,
    )  # fmt: skip
    samples = [each for each in build_samples(7) if (each.group_index >= 5) == (ranks.rank == 1)]
    norms = [trainer.step(samples)["train/grad_norm"] for _ in range(3)]
    weights = {name: weight.float().cpu() for name, weight in iter_whole_weights(model)}
    return {"norms": norms, "weights": weights, "masters": dict.fromkeys(trainer.state_dict()["optimizer"], 1)}


def run_rank(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    place = RankInfo(rank=rank, world_size=2, local_rank=rank, address=f"127.0.0.1:{port}")
    with open_ranks(place, device=torch.device("cuda", rank), timeout_s=120) as ranks:
        results = {is_sharded: train(ranks, is_sharded=is_sharded) for is_sharded in (False, True)}
    torch.save(results, folder / f"{rank}.pt")


def test_two_gpus_with_sharded_weights_make_the_updates_of_whole_ones(tmp_path):
    multiprocessing.spawn(run_rank, (find_free_port(), tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    whole, sharded = first[False], first[True]
    assert sharded["masters"] == whole["masters"]
    torch.testing.assert_close(sharded["norms"], whole["norms"], rtol=0.02, atol=0)
    for name, weight in whole["weights"].items():
        assert torch.equal(sharded["weights"][name], second[True]["weights"][name])
        assert (sharded["weights"][name] - weight).norm() <= 0.02 * weight.norm(), name
