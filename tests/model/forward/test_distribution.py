"""Truncation compared with a token-by-token reference in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.model.forward.distribution import has_truncation, truncate_logits
from tunesmith.types import Distribution


def compute_probabilities(logits: np.ndarray, distribution: Distribution) -> np.ndarray:
    """One row from the definition: bias, temperature, then each filter on the remaining tokens, renormalized."""
    logits = logits.astype(np.float64).copy()
    for token, bias in distribution.logit_bias:
        logits[token] += bias
    if distribution.temperature == 0:
        return np.exp(logits - np.logaddexp.reduce(logits))
    probs = np.exp(logits / distribution.temperature - np.logaddexp.reduce(logits / distribution.temperature))
    if distribution.top_k:
        probs = np.where(probs >= np.sort(probs)[::-1][: distribution.top_k][-1], probs, 0)
        probs /= probs.sum()
    if distribution.top_p < 1:
        kept, mass = [], 0.0
        for token in np.argsort(-probs):
            if mass < distribution.top_p or probs[token] == probs[kept[-1]]:
                kept.append(token)
                mass += probs[token]
        probs = np.where(np.isin(np.arange(len(probs)), kept), probs, 0)
        probs /= probs.sum()
    if distribution.min_p:
        probs = np.where(probs >= distribution.min_p * probs.max(), probs, 0)
        probs /= probs.sum()
    return probs


distributions = st.builds(
    Distribution,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.6, 0.93, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    logit_bias=st.sampled_from([(), ((2, 1.5),), ((0, -100.0), (4, 0.5), (4, 0.25))]),
)


@given(distributions, st.integers(0, 50))
def test_truncation_equals_the_definition(distribution, seed):
    logits = np.random.default_rng(seed).normal(size=(3, 9)) * 2
    ours = truncate_logits(torch.from_numpy(logits), distribution).softmax(-1)
    for row, expected in zip(ours.numpy(), (compute_probabilities(row, distribution) for row in logits), strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-9, atol=1e-15)


def test_filters_by_hand():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = {
        "top_k": (Distribution(top_k=2), [True, True, False, False]),
        "top_p": (Distribution(top_p=0.65), [True, True, False, False]),
        "top_p after top_k": (Distribution(top_k=2, top_p=0.55), [True, False, False, False]),
        "min_p": (Distribution(min_p=0.45), [True, True, True, False]),
    }
    for name, (distribution, expected) in kept.items():
        assert truncate_logits(logits, distribution).isfinite()[0].tolist() == expected, name


def test_equal_logits_are_kept_together():
    logits = torch.zeros(1, 4)
    for distribution in (Distribution(top_k=2), Distribution(top_p=0.3)):
        assert truncate_logits(logits, distribution).isfinite().all()


def test_kept_ids_survive_every_filter():
    logits = torch.tensor([[3.0, 0.0, -3.0], [3.0, 0.0, -3.0]])
    kept = truncate_logits(logits, Distribution(top_k=1), keep_ids_N=torch.tensor([2, 0]))
    assert kept.isfinite().tolist() == [[True, False, True], [True, False, False]]


def test_greedy_is_neither_tempered_nor_truncated():
    logits = torch.randn(2, 5)
    greedy = Distribution(temperature=0, top_k=1, top_p=0.1, min_p=0.5)
    assert not has_truncation(greedy)
    assert torch.equal(truncate_logits(logits, greedy), logits)


def test_input_is_not_changed():
    logits = torch.randn(2, 5)
    before = logits.clone()
    truncate_logits(logits, Distribution(temperature=0.5, top_k=2, logit_bias=((1, 2.0),)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("distribution", [Distribution(top_k=2), Distribution(top_p=0.5), Distribution(min_p=0.9)])
def test_gradient_of_dropped_tokens_is_zero(distribution):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    truncated = truncate_logits(logits, distribution)
    truncated.log_softmax(-1)[0, 3].backward()
    assert (logits.grad[truncated == -math.inf] == 0).all()
    assert logits.grad.isfinite().all()
