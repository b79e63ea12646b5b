"""Replayed routes and the balance loss: gradients of a hand-written loop, for any packing; which tokens have routes."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_gradients import assert_same, build_samples, compute_naive_loss, run_naively, run_ours, take_gradient
from test_trainer import build_trainer, read_parameters
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from routes import ForcedRoutes, route_by_prefix, run_forced
from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.experience.samples import build_samples as merge_turns
from tunesmith.model.experts import ROUTING, RowRouting, find_experts
from tunesmith.trainer.batch import gather_routes
from tunesmith.trainer.layers.gradient_checkpointing import enable_checkpointing
from tunesmith.trainer.loss_pass import PassSetup
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.update import StepScores, compute_gradient
from tunesmith.types import Distribution, Group, Sample, Task, Trajectory, Turn

SECTION = AlgorithmSection(loss_aggregation="token-mean")
PACKINGS = [{}, {"max_tokens": 25}, {"max_tokens": 60, "has_sharing": False, "chunk_tokens": 7}]


def build_mixture(name: str = "qwen3_moe", **settings):
    model = build_trainable(name)
    with torch.no_grad():  # so that gates matter
        for _, experts in find_experts(model):
            experts.down_proj.mul_(20)
    setattr(model, ROUTING, RowRouting(model, TrainerSection(**settings), max_tokens=1000))
    return model


class ForcedModel:
    """For `compute_naive_loss`: a model that computes each sample with its routes."""

    def __init__(self, model, name: str, samples: list[Sample]) -> None:
        self._model, self._forced = model, ForcedRoutes(model, name)
        self._samples = {sample.token_ids: sample for sample in samples}

    def __call__(self, input_ids):
        sample = self._samples[tuple(input_ids[0].tolist())]
        self._forced.routes = torch.from_numpy(sample.routes)
        return self._model(input_ids=input_ids)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_gradients_with_replayed_routes_equal_those_of_a_naive_loop_on_rows_and_tries(name):
    num_layers = 3 if name == "qwen3_moe" else 2
    samples = route_by_prefix(build_samples(), num_layers=num_layers)
    model = build_mixture(name, routing_replay=True)
    own = run_ours(build_mixture(name), samples, SECTION)
    plain = copy.deepcopy(model)
    loss = compute_naive_loss(ForcedModel(plain, name, samples), samples, SECTION)
    loss.backward()
    expected = loss.item(), take_gradient(plain)
    is_router = [torch.full((each.numel(),), ".gate.weight" in name) for name, each in plain.named_parameters()]
    routers = expected[1][torch.cat(is_router)]
    assert len(routers) == num_layers * 8 * 32 and routers.norm() > 1e-3
    assert abs(own[0] - expected[0]) > 1e-3, "the model's own routes are others"
    for packing in PACKINGS:
        found = run_ours(model, samples, SECTION, **packing)
        assert_same(found, expected, tolerance=2e-6)
        assert (found[1][torch.cat(is_router)] - routers).norm() < 5e-6 * routers.norm()


def test_tokens_without_routes_are_routed_by_the_trainer_and_counted():
    samples = build_samples()[:4]
    model = build_mixture(routing_replay=True)
    assert_same(run_ours(model, samples, SECTION), run_naively(build_mixture(), samples, SECTION), 2e-6)
    routed = route_by_prefix(samples)
    partly = [replace(routed[0], group_index=9), *samples[1:]]
    trainer = build_trainer(build_trainable("qwen3_moe", dtype=torch.float32), routing_replay=True)
    metrics = trainer.step(partly)
    num_events = [sum(sample.is_sampled) for sample in partly]
    assert metrics["routing/unrecorded"] == pytest.approx(sum(num_events[1:]) / sum(num_events))
    assert 0 < metrics["routing/changed"] <= num_events[0] / sum(num_events) + 1e-6
    plain = build_trainer(build_trainable("qwen3_moe", dtype=torch.float32)).step(partly)
    assert "routing/changed" not in plain and "routing/unrecorded" not in plain


def test_a_sampler_with_another_router_is_matched_by_its_routes():
    """Logprobs of a model whose routers were disturbed since its routes were recorded, against those of its routes."""
    samples = route_by_prefix(build_samples()[:4])
    changed = build_trainable("qwen3_moe", dtype=torch.float32)
    plain = copy.deepcopy(changed)
    forced, scored = ForcedRoutes(plain, "qwen3_moe"), []
    for sample in samples:
        sample = replace(sample, distribution_spans=())
        with torch.no_grad():
            logprobs = run_forced(plain, forced, sample).log_softmax(-1)
        values = [0.0] + [logprobs[time - 1, token].item() for time, token in enumerate(sample.token_ids) if time]
        masked = tuple(value if mask else 0.0 for value, mask in zip(values, sample.is_sampled, strict=True))
        scored.append(replace(sample, logprobs=masked))
    metrics = build_trainer(copy.deepcopy(changed), routing_replay=True, has_prefix_sharing=False).step(scored)
    assert metrics["mismatch/max_log_ratio"] < 1e-4 and metrics["routing/changed"] > 0.9
    own = build_trainer(copy.deepcopy(changed), has_prefix_sharing=False).step(scored)
    assert own["mismatch/max_log_ratio"] > 0.02


def run_update(samples, *, coef=0.3, is_checkpointed=False, name="qwen3_moe", **packing) -> tuple[float, torch.Tensor]:
    """The balance loss of an update, and the gradient with it."""
    model = build_mixture(name, router_aux_loss_coef=coef)
    settings = TrainerSection(
        max_tokens_per_row=packing.get("max_tokens", 10_000), has_prefix_sharing=packing.get("has_sharing", True),
        has_gradient_checkpointing=is_checkpointed,
    )  # fmt: skip
    if is_checkpointed:
        enable_checkpointing(model)
    setup = PassSetup(model=model, settings=settings, chunk_tokens=packing.get("chunk_tokens", 1000))
    totals, _ = compute_gradient(
        setup, resolve_algorithm(SECTION), samples, setup.pack(samples), StepScores(),
        policy_version=0, is_first=False, step=0,
    )  # fmt: skip
    return totals["routing/balance_loss"][1].item(), take_gradient(model)


def run_balanced_naively(samples, *, coef: float) -> tuple[float, torch.Tensor]:
    model = build_mixture()
    forced = ForcedRoutes(model, "qwen3_moe")
    probabilities, choices = [], []
    for sample in samples:
        forced.logits.clear()
        model(input_ids=torch.tensor([sample.token_ids]))
        events = torch.tensor(sample.is_sampled).nonzero()[:, 0] - 1
        for logits in forced.logits:
            probability = logits[events].softmax(-1)
            probabilities.append(probability)
            choices.append(torch.zeros_like(probability).scatter_(1, probability.topk(2).indices, 1.0))
    balance = 8 * (torch.cat(choices).mean(0) * torch.cat(probabilities).mean(0)).sum()
    (compute_naive_loss(model, samples, SECTION) + coef * balance).backward()
    return balance.item(), take_gradient(model)


def test_the_balance_loss_has_the_gradient_of_the_formula_over_the_whole_update():
    samples = build_samples()
    expected = run_balanced_naively(samples, coef=0.3)
    assert not torch.allclose(run_update(samples, coef=1e-9)[1], expected[1], rtol=1e-2)
    for packing in PACKINGS:
        assert_same(run_update(samples, **packing), expected, tolerance=2e-6)
    assert_same(run_update(samples, is_checkpointed=True), expected, tolerance=2e-6)


def test_the_balance_loss_is_that_of_transformers():
    (sample, *_) = build_samples(2)
    model = build_mixture()
    forced = ForcedRoutes(model, "qwen3_moe")
    model(input_ids=torch.tensor([sample.token_ids]))
    attended = torch.tensor([[*sample.is_sampled[1:], False]])
    expected = load_balancing_loss_func(tuple(forced.logits), num_experts=8, top_k=2, attention_mask=attended)
    assert run_update([sample])[0] == pytest.approx(expected.item(), rel=1e-5)


def test_fine_tuning_balances_too_and_a_demonstration_does_not_count():
    samples = build_samples()[:3]
    section = AlgorithmSection(algorithm_type="sft")
    first, second = (build_trainable("qwen3_moe", dtype=torch.float32) for _ in range(2))
    metrics = build_trainer(first, section, router_aux_loss_coef=1.0).step(samples)
    build_trainer(second, section).step(samples)
    assert metrics["routing/balance_loss"] > 1.9  # it is 2 for an equal load of two experts a token
    assert not torch.equal(read_parameters(first), read_parameters(second))
    with_expert = [*samples, replace(build_samples(4)[0], is_expert=True, group_index=8, trajectory_index=90)]
    assert run_update(with_expert)[0] == pytest.approx(run_update(samples)[0], rel=1e-9)


TASK = Task(task_id="t", index=0, row={})


def build_turn(prompt: list[int], sampled: list[int], routes: np.ndarray | None) -> Turn:
    return Turn(
        prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), logprobs=(0.0,) * len(sampled),
        policy_versions=(0,) * len(sampled), distribution=Distribution(), stop_reason="eos", routes=routes,
    )  # fmt: skip


def number(first: int, end: int) -> np.ndarray:
    """Routes that say at which token they were recorded."""
    return np.arange(first, end, dtype=np.int8)[:, None, None].repeat(2, axis=1)


def test_each_turn_of_a_sample_has_the_routes_with_which_it_was_sampled():
    first = build_turn([1, 2, 3], [4, 5], number(0, 4))
    again = build_turn([1, 2, 3, 4, 5, 6], [7, 8], number(40, 47))  # computed from the start
    sibling = build_turn([1, 2, 3, 4, 5, 9], [10, 11], number(54, 57))  # the new tokens only
    unknown = build_turn([1, 2, 3, 4, 5, 9, 10, 11], [12, 13], None)
    runs = (Trajectory(task=TASK, run_index=0, turns=(first, again, sibling, unknown), reward=1.0),)
    samples, _ = merge_turns([Group(task=TASK, trajectories=runs)], [[1.0]])
    found = {sample.token_ids[-1]: sample.routes[:, 0, 0].tolist() for sample in samples}
    assert found == {
        8: [0, 1, 2, 3, 44, 45, 46, -1],
        13: [0, 1, 2, 3, 54, 55, 56, -1, -1, -1],
    }


def test_a_shared_token_has_the_route_of_one_rollout_and_rows_of_several_tries_their_own():
    paths = [((1, 2, 3, 4), 0), ((1, 2, 5, 6), 0), ((1, 2, 3, 4), 1), ((7, 8, 9, 9), 2)]
    samples = [
        Sample(
            token_ids=ids, is_sampled=(False, False, True, True), logprobs=(0.0,) * 4, advantages=(1.0,) * 4,
            policy_versions=(None, None, 0, 0), distribution_spans=(), group_index=group, trajectory_index=index,
            routes=None if index == 3 else number(10 * index, 10 * index + 4),
        )
        for index, (ids, group) in enumerate(paths)
    ]  # fmt: skip
    (row,) = pack_samples(samples, max_tokens_per_row=100, has_prefix_sharing=True, hidden_size=32)
    nodes = zip(row.token_ids_T.tolist(), row.owner_T.tolist(), strict=True)
    assert dict(zip(nodes, gather_routes(samples, row)[:, 0, 0].tolist(), strict=True)) == {
        (1, 0): 0, (2, 0): 1, (3, 0): 2, (5, 1): 12, (1, 2): 20, (2, 2): 21, (3, 2): 22,
        (7, 3): -1, (8, 3): -1, (9, 3): -1,
    }  # fmt: skip
