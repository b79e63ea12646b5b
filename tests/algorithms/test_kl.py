"""KL estimators against golden values, and their gradients against the exact divergences on three tokens."""

from __future__ import annotations

import pytest
import torch

from tunesmith.algorithms.kl import adapt_kl_coef, compute_kl


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.06474940), ("k2", 0.29761651), ("k3", 0.29736009), ("abs", 0.62881166)]
)
def test_estimators_equal_the_golden_values(estimator, expected):
    torch.manual_seed(42)
    logprobs, reference, _, mask = torch.rand(4, 10), torch.rand(4, 10), torch.rand(4, 10), torch.rand(4, 10)
    draws = [2 * x - 1 for x in (logprobs, reference)]
    kl = compute_kl(draws[0], draws[1], estimator=estimator)
    assert kl[mask > 0.5].mean().item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.float64, 2e-14)])
def test_abs_has_no_gradient_where_the_policies_differ_by_rounding(dtype, rounding):
    d = torch.tensor([rounding, -rounding, 0.0, 2 * rounding, -2 * rounding, 0.5], dtype=dtype, requires_grad=True)
    kl = compute_kl(d, torch.zeros(6, dtype=dtype), estimator="abs")
    kl.sum().backward()
    assert d.grad.tolist() == [0, 0, 0, 1, -1, 1]
    torch.testing.assert_close(kl.detach(), d.detach().abs().where(d.grad != 0, 0.0), rtol=0, atol=0)


LOGITS = torch.tensor([0.3, -1.2, 0.9], dtype=torch.float64)
OTHER = torch.tensor([-0.4, 0.5, 0.1], dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_value_is_unbiased(estimator):
    logp = LOGITS.log_softmax(0)
    exact = (logp.exp() * (logp - OTHER)).sum()
    assert (logp.exp() * compute_kl(logp, OTHER, estimator=estimator)).sum().item() == pytest.approx(exact.item())


def expected_gradient(estimator: str) -> torch.Tensor:
    """Expected gradient of the estimate as a loss, over tokens from the policy (without gradient of the sampling)."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    (logp.exp().detach() * compute_kl(logp, OTHER, estimator=estimator)).sum().backward()
    return logits.grad


def exact_gradient(is_reverse: bool) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    kl = (OTHER.exp() * (OTHER - logp)).sum() if is_reverse else (logp.exp() * (logp - OTHER)).sum()
    kl.backward()
    return logits.grad


def test_expected_gradient_of_each_estimator():
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient(is_reverse=False))
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient(is_reverse=True))


SAMPLER = torch.tensor([0.1, -0.3, 0.6], dtype=torch.float64).log_softmax(0)


def test_corrected_estimate_is_unbiased_for_any_sampler():
    """Value and gradient on tokens of another policy are those of the KL, for ratios below the clip."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    assert (logp - SAMPLER).exp().max() < 2
    total = (SAMPLER.exp() * compute_kl(logp, OTHER, estimator="corrected_k3", sampler_logprobs_N=SAMPLER)).sum()
    total.backward()
    assert total.item() == pytest.approx((logp.exp() * (logp - OTHER)).sum().item())
    torch.testing.assert_close(logits.grad, exact_gradient(is_reverse=False))


def test_corrected_estimate_clips_its_ratio():
    logp, old = torch.tensor([-0.1]), torch.tensor([-3.0])
    k3 = compute_kl(logp, old + 1, estimator="k3")
    torch.testing.assert_close(compute_kl(logp, old + 1, estimator="corrected_k3", sampler_logprobs_N=old), 2 * k3)


def test_coefficient_follows_its_target():
    settings = {"target": 0.1, "num_trajectories": 50, "horizon": 100}
    assert adapt_kl_coef(1.0, kl=0.1, **settings) == pytest.approx(1.0)
    assert adapt_kl_coef(1.0, kl=0.11, **settings) == pytest.approx(1 + 0.1 * 0.5)
    assert adapt_kl_coef(1.0, kl=0.5, **settings) == pytest.approx(1 + 0.2 * 0.5)
    assert adapt_kl_coef(1.0, kl=0.0, **settings) == pytest.approx(1 - 0.2 * 0.5)


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_coefficient_stays_positive_in_updates_beyond_its_horizon(kl):
    coef = adapt_kl_coef(1.0, kl=kl, target=0.1, num_trajectories=512, horizon=50)
    assert coef == pytest.approx(adapt_kl_coef(1.0, kl=kl, target=0.1, num_trajectories=50, horizon=50))
    assert coef == pytest.approx(1.2 if kl else 0.8)


def test_k3_is_never_negative_and_resolves_small_differences():
    """With exp instead of expm1, half of these are negative or 0 in float32."""
    torch.manual_seed(0)
    d = torch.cat([scale * torch.randn(20_000) for scale in (1e-8, 1e-6, 1e-4, 1e-2)])
    k3 = compute_kl(d, torch.zeros_like(d), estimator="k3")
    assert (k3 >= 0).all()
    is_seen = d.abs() > 1e-5
    exact = torch.expm1(-d.double()) + d.double()
    torch.testing.assert_close(k3[is_seen].double(), exact[is_seen], rtol=0.02, atol=0)


def test_k3_of_extreme_differences_is_bounded():
    """The log-ratio is clamped to 20 on both sides; without, e^-d overflows, and d alone grows without bound."""
    d = torch.tensor([-1e4, 1e4], dtype=torch.float64)
    expected = torch.tensor([20.0, -20.0], dtype=torch.float64).expm1() - torch.tensor([20.0, -20.0])
    torch.testing.assert_close(compute_kl(d, torch.zeros(2, dtype=torch.float64), estimator="k3"), expected)
