"""Logprobs and entropies from hidden states: values, gradients, and how many logits are in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_distribution import compute_probabilities

from tiny_models import SIZES
from trainable_models import build_trainable
from tunesmith.model.forward import logprobs as logprobs_module
from tunesmith.model.forward.logits import compute_logits
from tunesmith.model.forward.logprobs import choose_chunk_tokens, compute_logprobs
from tunesmith.types import Distribution

VOCAB_SIZE, HIDDEN_SIZE = SIZES["vocab_size"], SIZES["hidden_size"]

DISTRIBUTIONS = [
    Distribution(),
    Distribution(temperature=0.7),
    Distribution(temperature=0),
    Distribution(top_k=3, temperature=1.3),
    Distribution(top_p=0.8),
    Distribution(min_p=0.1, logit_bias=((1, 2.0),)),
]


def build_inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(9, HIDDEN_SIZE, dtype=dtype, requires_grad=True), torch.randint(VOCAB_SIZE, (9,))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logprobs_and_entropies_equal_the_definition(name, distribution):
    model, (hidden, targets) = build_trainable(name), build_inputs()
    logits = compute_logits(model, hidden).detach().numpy()
    probs = np.stack([compute_probabilities(row, distribution) for row in logits])
    targets = torch.from_numpy(probs.argmax(1))
    logprobs, entropies = compute_logprobs(model, hidden, targets, distribution, chunk_tokens=4)
    np.testing.assert_allclose(logprobs.detach(), np.log(probs[np.arange(9), targets]), rtol=1e-9, atol=1e-12)
    surprise = np.log(probs, where=probs > 0, out=np.zeros_like(probs))
    np.testing.assert_allclose(entropies.detach(), -(probs * surprise).sum(1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 9, 100])
def test_gradients_equal_those_of_log_softmax(distribution, chunk_tokens):
    model, (hidden, targets) = build_trainable(is_tied=False), build_inputs()
    weights = torch.linspace(-1, 1, 9, dtype=torch.float64)
    head = model.get_output_embeddings().weight

    def differentiate(logprobs, entropies):
        return torch.autograd.grad((weights * logprobs).sum() + 0.3 * (weights**2 * entropies).sum(), [hidden, head])

    scores = compute_logprobs(model, hidden, targets, distribution, chunk_tokens=chunk_tokens, with_entropy=True)
    logits = logprobs_module.truncate_logits(compute_logits(model, hidden), distribution, keep_ids_N=targets)
    logp = logits.log_softmax(-1).masked_fill(logits.isinf(), -1e9)
    expected = differentiate(logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1))
    for ours, theirs in zip(differentiate(*scores), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_sampled_token_that_the_filters_drop_has_a_finite_logprob():
    model, (hidden, _) = build_trainable(), build_inputs()
    worst = compute_logits(model, hidden).argmin(1)
    assert compute_logprobs(model, hidden, worst, Distribution(top_k=1), chunk_tokens=4)[0].isfinite().all()


def test_logprobs_of_a_bfloat16_model_are_float32():
    model, (hidden, targets) = build_trainable(dtype=torch.bfloat16), build_inputs(torch.bfloat16)
    logprobs, entropies = compute_logprobs(model, hidden, targets, Distribution(), chunk_tokens=4)
    assert logprobs.dtype == entropies.dtype == torch.float32
    logprobs.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("chunk_tokens", "num_forwards"), [(3, 6), (9, 1)])
def test_the_backward_recomputes_logits_only_with_several_chunks(monkeypatch, chunk_tokens, num_forwards):
    sizes = []

    def count(model, hidden):
        sizes.append(len(hidden))
        return compute_logits(model, hidden)

    monkeypatch.setattr(logprobs_module, "compute_logits", count)
    model, (hidden, targets) = build_trainable(), build_inputs()
    compute_logprobs(model, hidden, targets, Distribution(), chunk_tokens=chunk_tokens)[0].sum().backward()
    assert sizes == [chunk_tokens] * num_forwards


def test_no_saved_tensor_is_larger_than_a_chunk_of_logits():
    model, (hidden, targets) = build_trainable(), build_inputs()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        compute_logprobs(model, hidden, targets, Distribution(), chunk_tokens=3)
    assert max(kept) < 3 * VOCAB_SIZE


@pytest.mark.parametrize(("vocab_size", "expected"), [(151_936, 896), (49_152, 2944), (10_000_000, 128)])
def test_default_chunks_outside_the_cpu_have_bounded_logits(vocab_size, expected):
    model = build_trainable("llama")
    assert choose_chunk_tokens(model) == 1024
    model.config.vocab_size = vocab_size
    assert choose_chunk_tokens(model.to("meta")) == expected
