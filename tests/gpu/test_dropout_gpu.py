"""LoRA dropout on a GPU: masks follow the seed and the step, with and without compiled layers and checkpointing."""

from __future__ import annotations

import pytest
import torch

from sample_spans import build_spans
from trainable_models import build_trainable
from tunesmith.config import AlgorithmSection, LoraSection, TrainerSection
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Distribution, Sample

pytestmark = pytest.mark.gpu


def build_demonstrations() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for row in range(6):
        length = 20 + 7 * row
        mask = [time >= 6 for time in range(length)]
        samples.append(
            Sample(
                token_ids=tuple(torch.randint(0, 97, (length,), generator=generator).tolist()),
                is_sampled=tuple(mask),
                logprobs=(0.0,) * length,
                advantages=tuple(float(trained) for trained in mask),
                policy_versions=tuple(0 if trained else None for trained in mask),
                distribution_spans=build_spans([Distribution() if trained else None for trained in mask]),
                group_index=row,
                trajectory_index=row,
            )
        )
    return samples


def run_step(*, seed: int, dropout: float = 0.4, **settings: bool) -> tuple[float, float]:
    """Loss and gradient norm of the first step."""
    model = build_trainable("qwen3", dtype=torch.bfloat16).cuda()
    lora = LoraSection(r=4, dropout=dropout)
    add_adapter(model.requires_grad_(False), lora, base="", dtype=torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cuda") * 0.2)
    trainer = Trainer(
        model.eval(),
        TrainerSection(learning_rate=1e-3, mismatch_stop=1e9, mismatch_warn=1e9, **settings),
        AlgorithmSection(algorithm_type="sft"),
        max_model_len=128,
        num_total_steps=4,
        dropout_seed=seed,
    )
    metrics = trainer.step(build_demonstrations())
    return metrics["train/loss"], metrics["train/grad_norm"]


@pytest.mark.parametrize("has_compiled_layers", [False, True])
@pytest.mark.parametrize("has_gradient_checkpointing", [False, True])
def test_dropout_follows_the_seed(has_compiled_layers: bool, has_gradient_checkpointing: bool) -> None:
    settings = {
        "has_compiled_layers": has_compiled_layers,
        "has_gradient_checkpointing": has_gradient_checkpointing,
    }
    first = run_step(seed=5, **settings)
    assert run_step(seed=5, **settings) == pytest.approx(first, rel=1e-3)
    assert run_step(seed=6, **settings)[1] != pytest.approx(first[1], rel=1e-3)
    assert run_step(seed=5, dropout=0.0, **settings)[1] != pytest.approx(first[1], rel=1e-3)


def test_checkpointing_recomputes_the_same_masks() -> None:
    plain = run_step(seed=5, has_compiled_layers=False)
    recomputed = run_step(seed=5, has_compiled_layers=False, has_gradient_checkpointing=True)
    assert recomputed == pytest.approx(plain, rel=1e-3)
