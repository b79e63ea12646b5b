"""AdamW against torch's, against the update rule in float64, and its saved state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tunesmith.config import TrainerSection
from tunesmith.errors import ModelError
from tunesmith.trainer.optimizer import MasterAdamW, compute_checksum

SETTINGS = TrainerSection(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), max_grad_norm=0.5)


def build_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)


def run_backward(model: nn.Module, step: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()


def run_updates(model: nn.Module, optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        run_backward(model, step)
        norm = optimizer.compute_grad_norm()
        optimizer.update(learning_rate=1e-2 / (step + 1), grad_norm=norm, max_grad_norm=0.5)


def compute_reference(start: torch.Tensor, gradients: list[torch.Tensor], norms: list[float], decay: float):
    """The rule of Loshchilov and Hutter (2019), algorithm 2, in float64."""
    x, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for step, (gradient, norm) in enumerate(zip(gradients, norms, strict=True)):
        g, rate = gradient.double() * min(1.0, 0.5 / (norm + 1e-6)), 1e-2 / (step + 1)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
        x = x - rate * decay * x - rate * m_hat / (v_hat.sqrt() + 1e-8)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_relative_update_is_the_change_over_the_size_of_the_weights(dtype):
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    optimizer = MasterAdamW(model, TrainerSection())
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 4.0]]))
        before = optimizer.sample_weights()
        assert optimizer.measure_change(before)["train/relative_update"].item() == 0
        model.weight[0, 1] += 0.3
        model.weight[1, 0] -= 0.4
    assert optimizer.measure_change(before)["train/relative_update"].item() == pytest.approx(0.5 / 5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_updates_equal_the_rule(dtype, tolerance):
    model = build_model(dtype)
    start = copy.deepcopy(model.state_dict())
    optimizer, gradients, norms = MasterAdamW(model, SETTINGS), [], []
    for step in range(4):
        run_backward(model, step)
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        norm = optimizer.compute_grad_norm()
        norms.append(norm.item())
        optimizer.update(learning_rate=1e-2 / (step + 1), grad_norm=norm, max_grad_norm=0.5)
    for name, parameter in model.named_parameters():
        decay = 0.1 if parameter.ndim == 2 else 0.0
        expected = compute_reference(start[name], [g[name] for g in gradients], norms, decay)
        torch.testing.assert_close(parameter.double(), expected, rtol=tolerance, atol=tolerance)


def test_float32_updates_equal_those_of_torch():
    model = build_model()
    theirs = copy.deepcopy(model)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=True)
    run_updates(model, MasterAdamW(model, SETTINGS), range(5))
    for step in range(5):
        run_backward(theirs, step)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        adamw.step()
        adamw.zero_grad()
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_bfloat16_parameters_follow_float32_masters():
    """Steps far below the rounding of bfloat16 add up."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    pointer = model.weight.data_ptr()
    optimizer = MasterAdamW(model, TrainerSection(learning_rate=1e-5))
    before = optimizer.state_dict()["master:weight"].item()
    for _ in range(1000):
        model.weight.sum().backward()
        optimizer.update(learning_rate=1e-5, grad_norm=optimizer.compute_grad_norm(), max_grad_norm=10.0)
    master = optimizer.state_dict()["master:weight"]
    assert master.item() == pytest.approx(before - 0.01, abs=5e-5)
    assert torch.equal(model.weight, master.to(torch.bfloat16))
    assert model.weight.data_ptr() == pointer


def test_masters_are_spread_over_the_values_that_round_to_the_parameter():
    model = nn.Linear(400, 1000, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.mul_(torch.logspace(-6, 3, 1000)[:, None])
        model.weight[:, :4] = torch.tensor([0.0, -0.0, 1.0, -2.0])
    master = MasterAdamW(model, TrainerSection()).state_dict()["master:weight"]
    assert torch.equal(master.to(torch.bfloat16), model.weight)
    assert torch.equal(master[:, :2], torch.zeros(1000, 2))
    bits = (master.view(torch.int32) - model.weight.float().view(torch.int32))[:, 2:].double() / 2**16
    assert bits.abs().max() < 0.5
    assert bits.mean().abs() < 2e-3
    assert bits.pow(2).mean() == pytest.approx(1 / 12, rel=0.01)


def test_rounded_weights_follow_on_average_from_the_first_update():
    model = nn.Linear(400, 1000, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 0.1)
    start = model.weight.double().mean()
    optimizer = MasterAdamW(model, TrainerSection(learning_rate=1e-5))
    model.weight.sum().backward()
    optimizer.update(learning_rate=1e-5, grad_norm=optimizer.compute_grad_norm(), max_grad_norm=1e9)
    assert (model.weight.double().mean() - start).item() == pytest.approx(-1e-5, rel=0.1)


def test_gradients_of_bfloat16_parameters_accumulate_in_float32():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = MasterAdamW(model, TrainerSection())
    for value in (256.0, *[1.0] * 8):
        (value * model.weight).sum().backward()
    assert optimizer.compute_grad_norm().item() == 264.0


def test_frozen_parameters_are_not_updated():
    model = build_model()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    run_updates(model, MasterAdamW(model, SETTINGS), range(2))
    assert torch.equal(model[0].weight, before)
    with pytest.raises(ModelError, match="no parameter"):
        MasterAdamW(model.requires_grad_(False), SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_resumes_bit_for_bit(dtype):
    whole, first = build_model(dtype), build_model(dtype)
    run_updates(whole, MasterAdamW(whole, SETTINGS), range(6))
    optimizer = MasterAdamW(first, SETTINGS)
    run_updates(first, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    second = build_model(dtype)
    second.load_state_dict(first.state_dict())
    resumed = MasterAdamW(second, SETTINGS)
    resumed.load_state_dict(state)
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, state[key]), key
    run_updates(second, resumed, range(3, 6))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    run_updates(first, optimizer, range(3, 6))
    assert not torch.equal(state["exp_avg:0.weight"], optimizer.state_dict()["exp_avg:0.weight"])


def test_state_before_the_first_update_resumes():
    model = build_model()
    optimizer = MasterAdamW(model, SETTINGS)
    assert optimizer.state_dict() == {}
    optimizer.load_state_dict({})
    run_updates(model, optimizer, range(1))


def test_state_of_another_model_is_refused():
    model = build_model(torch.bfloat16)
    optimizer = MasterAdamW(model, SETTINGS)
    run_updates(model, optimizer, range(1))
    state = optimizer.state_dict()
    with pytest.raises(ModelError, match="does not have"):
        optimizer.load_state_dict(state | {"exp_avg:9.weight": torch.zeros(1)})
    with pytest.raises(ModelError, match="belongs to another model"):
        optimizer.load_state_dict(state | {"exp_avg:0.weight": torch.zeros(1)})
    with pytest.raises(ModelError, match="belongs to another model"):
        optimizer.load_state_dict({key: value for key, value in state.items() if key != "master:0.weight"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checksums_differ_where_a_weight_does(dtype):
    weights = [torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).to(dtype), torch.zeros(5, dtype=dtype)]
    whole = compute_checksum(weights)
    assert compute_checksum([each.clone() for each in weights]) == whole
    found = {whole}
    for tensor, place in ((0, 0), (0, 1199), (1, 4)):
        changed = [each.clone() for each in weights]
        flat = changed[tensor].view(-1)
        flat[place] += 2.0**-6
        found.add(compute_checksum(changed))
    swapped = [each.clone() for each in weights]
    swapped[0].view(-1)[:2] = swapped[0].view(-1)[:2].flip(0)
    found |= {compute_checksum(swapped), compute_checksum(weights[::-1])}
    assert len(found) == 6
    changed = [weights[0], torch.full_like(weights[1], 1e-30)]
    assert compute_checksum(changed) == whole
