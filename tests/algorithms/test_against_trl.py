"""Loss and gradient equal those of TRL on the same tokens."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.kl import compute_kl
from tunesmith.algorithms.scores import TokenInputs, TokenScores, compute_token_weights
from tunesmith.algorithms.sequence_terms import compute_correction_weights, find_top_entropy_tokens
from tunesmith.config import AlgorithmSection

trl = pytest.importorskip("trl")  # imports its trainers, which takes seconds, when they are named

LENGTHS = [7, 1, 4, 9, 3, 9]
MAX_LENGTH = 12
NO_DUAL_CLIP = {"clip_ratio_c": 1e9}


class Accelerator:
    """An accelerator with one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values):
        return values

    def pad_across_processes(self, values, dim, pad_index):
        return values

    def reduce(self, values, reduction):
        return values


def draw(seed: int) -> dict[str, torch.Tensor]:
    """Logprobs [B, T] of policy, old policy and reference, advantages [B] and the mask of completions."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), MAX_LENGTH)
    old = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    scale = torch.tensor([1e-3, 0.3, 0.3, 1.0, 0.05, 2e-4], dtype=torch.float64)[:, None]
    return {
        "old": old,
        "logps": old + scale * torch.randn(shape, generator=generator, dtype=torch.float64),
        "reference": old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64),
        "entropies": 3 * torch.rand(shape, generator=generator, dtype=torch.float64),
        "mask": (torch.arange(MAX_LENGTH)[None] < torch.tensor(LENGTHS)[:, None]).to(torch.float64),
    }


def load_trainer() -> type:
    return trl.GRPOTrainer


def load_gmpo_trainer() -> type:
    return pytest.importorskip("trl.experimental.gmpo").GMPOTrainer


def run_trl(data: dict[str, torch.Tensor], **settings) -> tuple[float, torch.Tensor]:
    """TRL's loss code, with a model replaced by its logprobs."""
    options = {
        "loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2,
        "epsilon_high": 0.2, "off_policy_mask_threshold": None, "use_bias_correction_kl": False,
        "top_entropy_quantile": 1.0,
    } | settings  # fmt: skip
    logps = data["logps"].clone().requires_grad_()
    args = SimpleNamespace(
        delta=None, steps_per_generation=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        use_bias_correction_kl=options.pop("use_bias_correction_kl"),
    )  # fmt: skip
    trainer = object.__new__(options.pop("load_trainer", load_trainer)())
    trainer.__dict__ |= options | {
        "args": args, "model": SimpleNamespace(training=True), "accelerator": Accelerator(),
        "current_gradient_accumulation_steps": 1, "max_completion_length": MAX_LENGTH,
        "aux_loss_enabled": False, "use_vllm": False, "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logps, data["entropies"], None),
    }  # fmt: skip
    ids = torch.zeros(data["mask"].shape, dtype=torch.long)
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
            "completion_mask": data["mask"], "advantages": data["advantages"], "old_per_token_logps": data["old"],
            "ref_per_token_logps": data["reference"], "num_items_in_batch": data["mask"].sum(),
        },
    )  # fmt: skip
    loss.backward()
    return loss.item(), logps.grad


def run_ours(data: dict[str, torch.Tensor], **section) -> tuple[float, torch.Tensor]:
    """As in the trainer: terms of all tokens, per-token losses, aggregation weights."""
    section = AlgorithmSection(**section)
    algorithm = resolve_algorithm(section)
    mask = data["mask"].bool()
    logps = data["logps"].clone().requires_grad_()
    rows = torch.arange(len(LENGTHS))[:, None].expand(mask.shape)[mask].numpy()
    advantages = data["advantages"][:, None].expand(mask.shape)[mask]
    scores = TokenInputs(
        old_logprobs_E=data["old"][mask].numpy(), advantages_E=advantages.numpy(), sequence_E=rows,
        group_E=rows, sampler_logprobs_E=data["old"][mask].numpy(), proximal_logprobs_E=data["old"][mask].numpy(),
        logprobs_E=data["logps"][mask].numpy(), entropies_E=data["entropies"][mask].numpy(),
    )  # fmt: skip
    terms = algorithm.compute_terms(scores)
    ratios, selected = terms.sequence_log_ratios_E, terms.is_selected_E
    losses = algorithm.compute_losses(
        TokenScores(
            logprobs_N=logps[mask],
            old_logprobs_N=data["old"][mask],
            advantages_N=advantages,
            sequence_log_ratios_N=None if ratios is None else torch.from_numpy(ratios),
            is_selected_N=None if selected is None else torch.from_numpy(selected.astype(np.float64)),
        )
    ).losses_N
    correction, _ = compute_correction_weights(terms, algorithm.section.correction, is_weighted=False)
    kept, _ = find_top_entropy_tokens(scores, fraction=algorithm.section.top_entropy_fraction)
    if terms.correction_E is not None:
        correction = terms.correction_E * correction
    losses = losses * torch.from_numpy(correction * kept)
    if section.kl_coef:
        losses = losses + section.kl_coef * compute_kl(
            logps[mask], data["reference"][mask], estimator=section.kl_estimator, sampler_logprobs_N=data["old"][mask]
        )
    weights = compute_token_weights(rows, aggregation=algorithm.aggregation, norm_length=MAX_LENGTH)
    loss = (torch.from_numpy(weights) * losses).sum()
    loss.backward()
    return loss.item(), logps.grad


SEQUENCE_MEAN = {"loss_aggregation": "seq-mean-token-mean", "loss_args": NO_DUAL_CLIP}
CASES = {
    "grpo": ({"algorithm_type": "grpo", **SEQUENCE_MEAN}, {}),
    "dr_grpo": ({"algorithm_type": "dr_grpo", "loss_args": NO_DUAL_CLIP}, {"loss_type": "dr_grpo"}),
    "dapo": (
        {"algorithm_type": "dapo", "loss_args": NO_DUAL_CLIP},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "bnpo": ({"algorithm_type": "bnpo", "loss_args": NO_DUAL_CLIP}, {"loss_type": "bnpo"}),
    "cispo": ({"algorithm_type": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "gspo": (
        {"algorithm_type": "gspo"},
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "sapo": ({"algorithm_type": "sapo"}, {"loss_type": "sapo"}),
    "luspo": (
        {"algorithm_type": "luspo"},
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 2e-3,
            "epsilon_high": 2.5e-3,
        },
    ),
    "vespo": ({"algorithm_type": "vespo", "loss_aggregation": "token-mean"}, {"loss_type": "vespo"}),
    "gmpo": ({"algorithm_type": "gmpo"}, {"load_trainer": load_gmpo_trainer, "epsilon_low": 0.4, "epsilon_high": 0.4}),
    "dapo on tokens of high entropy": (
        {"algorithm_type": "dapo", "loss_args": NO_DUAL_CLIP, "top_entropy_fraction": 0.2},
        {"loss_type": "dapo", "epsilon_high": 0.28, "top_entropy_quantile": 0.2},
    ),
    "grpo with KL": (
        {"algorithm_type": "grpo", "kl_coef": 0.1, "kl_estimator": "k3", **SEQUENCE_MEAN},
        {"beta": 0.1},
    ),
    "grpo with corrected KL": (
        {"algorithm_type": "grpo", "kl_coef": 0.1, "kl_estimator": "corrected_k3", **SEQUENCE_MEAN},
        {"beta": 0.1, "use_bias_correction_kl": True},
    ),
    "grpo with off-policy sequence masking": (
        {"algorithm_type": "grpo", "correction": {"negative_sequence_delta": 0.05}, **SEQUENCE_MEAN},
        {"off_policy_mask_threshold": 0.05},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_trl(name, seed):
    ours, theirs = CASES[name]
    data = draw(seed)
    if name == "grpo with corrected KL":  # TRL does not clip the ratio at 2
        data["logps"] = torch.minimum(data["logps"], data["old"] + 0.6)
    (loss, gradient), (expected_loss, expected_gradient) = run_ours(data, **ours), run_trl(data, **theirs)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert expected_gradient.norm() > 0
    assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
