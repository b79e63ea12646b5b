"""Distillation advantages against exact gradients of the divergences on three tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from token_batches import build_scores
from tunesmith.algorithms.advantages.returns import compute_distillation_terms, compute_jsd_terms

LOGITS = torch.tensor([0.3, -1.2, 0.9], dtype=torch.float64)
TEACHER = torch.tensor([-0.4, 0.5, 0.1], dtype=torch.float64).log_softmax(0)


def compute_jsd(student: torch.Tensor, beta: float) -> torch.Tensor:
    """beta KL(T || M) + (1 - beta) KL(S || M), over the whole vocabulary."""
    mixture = (beta * TEACHER.exp() + (1 - beta) * student.exp()).log()
    teacher_part = (TEACHER.exp() * (TEACHER - mixture)).sum()
    return beta * teacher_part + (1 - beta) * (student.exp() * (student - mixture)).sum()


def take_policy_gradient(compute_terms, **args) -> torch.Tensor:
    """Minus the policy gradient of the advantages, in expectation over all three tokens."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    old = logprobs.detach()
    scores = build_scores([[0.0] * 3], old=[old.tolist()], teacher_logprobs=[TEACHER.tolist()])
    advantages = torch.from_numpy(compute_terms(scores, **args).advantages_E)
    (-old.exp() * advantages * logprobs).sum().backward()
    return logits.grad


def take_exact_gradient(divergence) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    divergence(logits.log_softmax(0)).backward()
    return logits.grad


def test_distillation_follows_the_gradient_of_the_reverse_kl():
    exact = take_exact_gradient(lambda student: (student.exp() * (student - TEACHER)).sum())
    torch.testing.assert_close(take_policy_gradient(compute_distillation_terms), exact)
    torch.testing.assert_close(take_policy_gradient(compute_distillation_terms, kl_coef=0.3), 0.3 * exact)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_follows_the_gradient_of_the_divergence_over_the_whole_vocabulary(beta):
    exact = take_exact_gradient(lambda student: compute_jsd(student, beta))
    torch.testing.assert_close((1 - beta) * take_policy_gradient(compute_jsd_terms, beta=beta), exact)


def test_jsd_at_one_is_distillation():
    scores = build_scores([[0.0] * 3], old=[[-1.0, -0.2, -3.0]], teacher_logprobs=[[-0.5, -2.0, -900.0]])
    expected = compute_distillation_terms(scores).advantages_E
    np.testing.assert_allclose(expected, [0.5, -1.8, -897.0])
    np.testing.assert_allclose(compute_jsd_terms(scores, beta=1.0).advantages_E, expected)


def test_jsd_is_positive_where_the_teacher_is_more_confident():
    rng = np.random.default_rng(0)
    old, teacher = -rng.exponential(3, 1000), -rng.exponential(3, 1000)
    scores = build_scores([[0.0] * 1000], old=[old], teacher_logprobs=[teacher])
    for beta in (0.01, 0.5, 0.99):
        advantages = compute_jsd_terms(scores, beta=beta).advantages_E
        np.testing.assert_array_equal(np.sign(advantages), np.sign(teacher - old))
        assert np.all(np.abs(advantages) <= np.abs(teacher - old))


def test_reverse_kl_to_the_teacher_is_reported():
    scores = build_scores([[1.0, 1.0]], old=[[-1.0, -2.0]], teacher_logprobs=[[-1.5, -2.5]])
    for compute in (compute_distillation_terms, compute_jsd_terms):
        assert compute(scores).metrics == {"distillation/reverse_kl": 0.5}
    empty = build_scores([], teacher_logprobs=[])
    assert compute_jsd_terms(empty).advantages_E.size == 0
