"""Packed rows as CUDA graphs: the same gradients and weights as launching kernel by kernel."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from test_trainer_gpu import build_samples
from transformers import PreTrainedModel

from routes import route_by_prefix
from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, LoraSection, TrainerSection
from tunesmith.model.experts import ROUTING, RowRouting
from tunesmith.trainer.layers.compiled_layers import compiled_layers
from tunesmith.trainer.layers.row_graphs import RowGraphs, can_capture
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.optimizer import MasterAdamW
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.update import prepare_update

pytestmark = pytest.mark.gpu


def build_model(kind: str) -> PreTrainedModel:
    if kind == "experts":
        model = copy.deepcopy(build_trainable("qwen3_moe", dtype=torch.float32)).bfloat16().cuda()
        setattr(model, ROUTING, RowRouting(model, TrainerSection(routing_replay=True), max_tokens=1200))
        return model
    model = build_trainable("qwen3", dtype=torch.bfloat16).cuda()
    if kind == "adapter":
        from tunesmith.model.adapters.lora import add_adapter  # PEFT takes seconds to import

        add_adapter(model.requires_grad_(False), LoraSection(r=4), base="", dtype=torch.bfloat16)
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", ["all weights", "adapter", "experts"])
def test_gradients_and_totals_equal_those_without_graphs(kind):
    """Those of experts are computed with routes that change from row to row."""
    model = build_model(kind)
    assert can_capture(model)
    algorithm, optimizer = resolve_algorithm(AlgorithmSection()), MasterAdamW(model, TrainerSection())
    graphs = RowGraphs(model)
    with compiled_layers(model):
        for seed in range(8):
            samples = build_samples(8, seed=seed)
            if kind == "experts":
                samples = route_by_prefix(samples)
            rows = pack_samples(samples, max_tokens_per_row=700, has_prefix_sharing=True, hidden_size=32)
            setup = PassSetup(model=model, chunk_tokens=128, compiled=(model,))
            inputs = prepare_update(setup, algorithm, samples, rows).inputs
            found = []
            for each in (None, graphs):
                optimizer.clear_gradients()
                totals = run_loss_pass(replace(setup, graphs=each), algorithm, samples, rows, inputs)
                gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
                found.append((gradient, torch.stack([value.double() for _, value in totals.values()])))
            (plain, plain_totals), (ours, our_totals) = found
            assert (ours - plain).norm() < 5e-2 * plain.norm(), seed
            torch.testing.assert_close(our_totals, plain_totals, rtol=5e-2, atol=1.0)
    assert graphs.num_captured > 0


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_steps_with_graphs_have_the_losses_of_steps_without(kl_coef):
    losses = []
    for has_graphs in (False, True):
        model = build_trainable("llama", dtype=torch.bfloat16).cuda()
        reference = build_trainable("llama", dtype=torch.bfloat16).cuda() if kl_coef else None
        settings = TrainerSection(learning_rate=3e-3, mismatch_stop=1e9, has_row_graphs=has_graphs)
        trainer = Trainer(
            model, settings, AlgorithmSection(kl_coef=kl_coef), max_model_len=256, num_total_steps=6,
            reference_model=reference,
        )  # fmt: skip
        losses.append([trainer.step(build_samples(8))["train/loss"] for _ in range(6)])
    plain, ours = losses
    assert plain[-1] < plain[0]
    assert ours == pytest.approx(plain, rel=0.05, abs=5e-3)


def test_moved_weights_are_captured_again():
    model = build_trainable("llama", dtype=torch.bfloat16).cuda()
    settings = TrainerSection(learning_rate=1e-3, mismatch_stop=1e9, has_row_graphs=True)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=256, num_total_steps=9)
    for _ in range(3):
        trainer.step(build_samples(8))
    assert trainer._setup.graphs.num_captured
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.step(build_samples(8))
    assert not trainer._setup.graphs.num_captured
    for _ in range(2):
        trainer.step(build_samples(8))
    assert trainer._setup.graphs.num_captured
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_rows_are_not_captured_while_an_autograd_graph_is_referenced(caplog):
    model = build_trainable("llama", dtype=torch.bfloat16).cuda()
    settings = TrainerSection(learning_rate=3e-3, mismatch_stop=1e9, has_row_graphs=True)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=256, num_total_steps=6)
    kept = [parameter.clone() for parameter in model.parameters()]
    losses = [trainer.step(build_samples(8))["train/loss"] for _ in range(6)]
    assert losses[-1] < losses[0]
    assert not trainer._setup.graphs.num_captured
    assert "an output of the model with a pending backward" in caplog.text
    del kept
