"""The refreshed reference on a CUDA device, with compiled layers and row graphs."""

from __future__ import annotations

import pytest
import torch
from test_trainer_gpu import build_samples

from trainable_models import build_trainable
from tunesmith.config import AlgorithmSection, LoraSection, TrainerSection
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.trainer.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("has_row_graphs", [False, True])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_kl_is_zero_after_a_refresh_on_the_gpu(has_adapter, has_row_graphs):
    model = build_trainable("qwen3", dtype=torch.bfloat16)
    if has_adapter:
        add_adapter(model, LoraSection(r=4), base="base", dtype=torch.bfloat16)
    model = model.cuda().eval()
    reference = model if has_adapter else build_trainable("qwen3", dtype=torch.bfloat16).cuda().requires_grad_(False)
    trainer = Trainer(
        model,
        TrainerSection(learning_rate=1e-2, mismatch_stop=1e9, has_row_graphs=has_row_graphs),
        AlgorithmSection(algorithm_type="grpo", kl_coef=0.1, reference_refresh_steps=2),
        max_model_len=256,
        num_total_steps=9,
        reference_model=reference,
    )
    rows = [trainer.step(build_samples(8)) for _ in range(4)]
    assert [row["train/reference_step"] for row in rows] == [0, 0, 2, 2]
    assert rows[1]["train/kl"] > 1e-4 < rows[3]["train/kl"]
    assert rows[2]["train/kl"] < 0.1 * rows[1]["train/kl"]
