"""The trainer on a CUDA device: flex attention over tries, and gradients that agree with float64 on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from trainable_models import build_trainable
from tunesmith.algorithms.table import resolve_algorithm
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.experience.trie import Trie, build_trie, concatenate_tries
from tunesmith.model.attention import attend_masked
from tunesmith.model.logprobs import compute_logprobs
from tunesmith.trainer.attention import FLEX_MIN_TOKENS, TreePlan
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.step import run_batch
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Distribution, Sample

pytestmark = pytest.mark.gpu


def build_samples(num_groups: int, *, prompt: int = 60, answer: int = 50) -> list[Sample]:
    rng, samples = random.Random(0), []
    for group in range(num_groups):
        shared = [rng.randrange(97) for _ in range(prompt)]
        for run in range(4):
            ids = shared + [rng.randrange(97) for _ in range(rng.randrange(answer // 2, answer))]
            mask = [False] * prompt + [True] * (len(ids) - prompt)
            samples.append(
                Sample(
                    token_ids=tuple(ids), is_sampled=tuple(mask),
                    logprobs=tuple(-4.5 if m else 0.0 for m in mask),
                    advantages=tuple((1.0 if run % 2 else -0.7) if m else 0.0 for m in mask),
                    policy_versions=tuple(0 if m else None for m in mask),
                    distributions=tuple(Distribution() if m else None for m in mask),
                    group_index=group, trajectory_index=4 * group + run,
                )
            )  # fmt: skip
    return samples


def build_row(samples: list[Sample]) -> Trie:
    groups = sorted({sample.group_index for sample in samples})
    return concatenate_tries(
        [build_trie(samples, [i for i, s in enumerate(samples) if s.group_index == group]) for group in groups]
    )


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (None, 5.0), (70, 5.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])
def test_flex_attention_equals_a_dense_mask(dtype, tolerance, window, softcap):
    torch._dynamo.reset()
    for num_groups in (8, 11):
        trie = build_row(build_samples(num_groups))
        assert trie.num_tokens > FLEX_MIN_TOKENS
        plan = TreePlan(trie, torch.device("cuda"))
        torch.manual_seed(0)
        inputs = [torch.randn(1, h, trie.num_tokens, 32, device="cuda").to(dtype).requires_grad_() for h in (6, 2, 2)]
        ours = plan.attend(None, *inputs, scaling=0.2, sliding_window=window, softcap=softcap).transpose(1, 2)
        weights = torch.randn_like(ours)
        wide = [x.detach().float().requires_grad_() for x in inputs]
        theirs = attend_masked(*wide, plan._get_dense_mask(window), scaling=0.2, softcap=softcap)
        ours_all = [ours, *torch.autograd.grad((ours * weights).sum(), inputs)]
        theirs_all = [theirs, *torch.autograd.grad((theirs * weights).sum(), wide)]
        for a, b in zip(ours_all, theirs_all, strict=True):
            assert (a.float() - b).norm() < tolerance * b.norm()


def compute_gradient(model: PreTrainedModel, samples: list[Sample], *, has_sharing: bool) -> torch.Tensor:
    rows = pack_samples(samples, max_tokens_per_row=4096, has_prefix_sharing=has_sharing, hidden_size=32)
    run_batch(model, samples, rows, resolve_algorithm(AlgorithmSection()), norm_length=1, chunk_tokens=256)
    gradient = torch.cat([parameter.grad.flatten().double().cpu() for parameter in model.parameters()])
    model.zero_grad()
    return gradient


def compute_errors(dtype: torch.dtype, seed: int) -> tuple[float, float]:
    """Relative errors of the gradient with and without prefix sharing."""
    samples = build_samples(8)
    model = build_trainable("qwen3", dtype=dtype, seed=seed).cuda()
    exact = compute_gradient(build_trainable("qwen3", dtype=dtype, seed=seed).double(), samples, has_sharing=True)
    tree, flat = (compute_gradient(model, samples, has_sharing=has_sharing) for has_sharing in (True, False))
    return ((tree - exact).norm() / exact.norm()).item(), ((flat - exact).norm() / exact.norm()).item()


def test_float32_gradient_agrees_with_float64_on_the_cpu():
    assert max(compute_errors(torch.float32, seed=0)) < 1e-4


def test_sharing_adds_no_error_in_bfloat16():
    errors = [compute_errors(torch.bfloat16, seed=seed) for seed in range(4)]
    assert sum(tree for tree, _ in errors) < 1.5 * sum(flat for _, flat in errors), errors


def test_steps_on_the_gpu_move_bfloat16_weights_in_place():
    model = build_trainable("qwen3", dtype=torch.bfloat16).cuda()
    settings = TrainerSection(learning_rate=1e-2, mismatch_stop=1e9, has_gradient_checkpointing=True)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=256, num_total_steps=4)
    pointers, before = [p.data_ptr() for p in model.parameters()], [p.clone() for p in model.parameters()]
    losses = [trainer.step(build_samples(8))["train/loss"] for _ in range(3)]
    assert losses[-1] < losses[0]
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_logits_of_one_chunk_at_most_are_alive():
    class Model(torch.nn.Module):
        """A head of 64k tokens, and what its logits are made with."""

        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(32, 65536, bias=False, device="cuda", dtype=torch.bfloat16)
            self.config = build_trainable("qwen3").config

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    model = Model()
    hidden = torch.randn(8192, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(65536, (8192,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    compute_logprobs(model, hidden, targets, Distribution(), chunk_tokens=512)[0].sum().backward()
    float32_chunk = 512 * 65536 * 4
    assert torch.cuda.max_memory_allocated() - start < 5 * float32_chunk
