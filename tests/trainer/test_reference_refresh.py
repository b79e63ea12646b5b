"""The reference of the KL becomes the current policy every n steps, and resumes exactly."""

from __future__ import annotations

import io

import pytest
import torch
from test_adapter_training import build_adapted, get_adapter
from test_gradients import build_samples
from test_trainer import LOOSE, read_parameters, score

from trainable_models import build_shallow
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.errors import ConfigError
from tunesmith.trainer.trainer import Trainer

KL = {"algorithm_type": "grpo", "kl_coef": 0.3}
KINDS = ["full", "adapter"]


def build(
    kind: str, refresh_steps: int | None = None, dtype=torch.float32, **section
) -> tuple[Trainer, torch.nn.Module]:
    """A trainer and its policy; with an adapter the policy is its own reference."""
    model = build_shallow(dtype=dtype) if kind == "full" else build_adapted(dtype=dtype)
    trainer = Trainer(
        model,
        TrainerSection(**{**LOOSE, "learning_rate": 1e-2}),
        AlgorithmSection(**{**KL, **section}, reference_refresh_steps=refresh_steps),
        max_model_len=64,
        num_total_steps=10,
        reference_model=build_shallow(dtype=dtype).requires_grad_(False) if kind == "full" else model,
    )
    return trainer, model


def take_steps(trainer: Trainer, num_steps: int) -> list[dict[str, float]]:
    return [trainer.step(build_samples()) for _ in range(num_steps)]


def save_and_load(state: dict) -> dict:
    """Through a file, as in a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_is_zero_after_each_refresh(kind, dtype):
    metrics = take_steps(build(kind, 2, dtype)[0], 5)
    assert [row["train/kl"] == 0 for row in metrics] == [kind == "full", False, True, False, True]
    assert [row["train/reference_step"] for row in metrics] == [0, 0, 2, 2, 4]
    constant = take_steps(build(kind, None, dtype)[0], 5)
    assert constant[:2] == [{k: v for k, v in row.items() if k != "train/reference_step"} for row in metrics[:2]]
    assert constant[4]["train/kl"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_is_that_to_the_policy_of_the_refresh(kind):
    """The KL in step 4, by logprobs of the policies after steps 2 and 3."""
    trainer, model = build(kind, 2)
    take_steps(trainer, 2)
    before = score(model, build_samples())
    take_steps(trainer, 1)
    after = score(model, build_samples())
    gaps = [
        b - a
        for one, other in zip(before, after, strict=True)
        for a, b, is_sampled in zip(one.logprobs, other.logprobs, one.is_sampled, strict=True)
        if is_sampled
    ]
    expected = sum(gap**2 / 2 for gap in gaps) / len(gaps)  # k2
    assert take_steps(trainer, 1)[0]["train/kl"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_trainer_continues_bit_for_bit(kind, num_steps):
    whole, expected = build(kind, 2)
    rows = take_steps(whole, 5)
    first, model = build(kind, 2)
    take_steps(first, num_steps)
    state = save_and_load(first.state_dict())
    assert ("reference" in state) == (num_steps >= 2)
    resumed, policy = build(kind, 2)
    policy.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    assert take_steps(resumed, 5 - num_steps) == rows[num_steps:]
    assert torch.equal(read_parameters(policy), read_parameters(expected))


def test_scoring_the_reference_leaves_the_adapter_as_it_was():
    trainer, model = build("adapter", 1)
    take_steps(trainer, 1)
    with torch.no_grad():
        for parameter in get_adapter(model).values():
            parameter.add_(0.01)
    before = read_parameters(model)
    trainer.compute_loss(build_samples())
    assert torch.equal(read_parameters(model), before)


def test_the_state_of_another_model_is_refused():
    trainer, _ = build("full", 1)
    take_steps(trainer, 1)
    state = trainer.state_dict()
    state["reference"]["weights"].pop("model.norm.weight")
    with pytest.raises(ConfigError, match=r"differ in their weights \(model.norm.weight\)"):
        build("full", 1)[0].load_state_dict(state)


def test_a_kl_in_the_reward_is_refreshed_too():
    section = {"algorithm_type": "rloo", "kl_coef": 0.0, "terms_args": {"reward_kl_coef": 0.1}}
    refreshed, constant = (take_steps(build("full", steps, **section)[0], 3) for steps in (1, None))
    assert refreshed[2]["train/reward_kl"] != constant[2]["train/reward_kl"]
