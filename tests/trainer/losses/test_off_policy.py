"""Steps on data of several policy versions: corrections, mismatch, and an adaptive KL coefficient."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from test_gradients import build_samples
from test_trainer import build_trainer, read_parameters, score

from trainable_models import build_shallow
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError, TrainingError
from tunesmith.types import Sample

GRPO = {"algorithm_type": "grpo"}
WIDE = {"level": "token", "low": 1e-9, "high": 1e9}


def count_forwards(model) -> list[None]:
    """One element for each forward of the body from now on."""
    forwards: list[None] = []
    model.get_decoder().register_forward_pre_hook(lambda *_: forwards.append(None))
    return forwards


def set_version(samples: list[Sample], version: int, *, shift: float = 0.0) -> list[Sample]:
    return [
        replace(
            sample,
            policy_versions=tuple(version if m else None for m in sample.is_sampled),
            logprobs=tuple(lp + shift if m else 0.0 for lp, m in zip(sample.logprobs, sample.is_sampled, strict=True)),
        )
        for sample in samples
    ]


def build_mixed(model, *, shift: float) -> list[Sample]:
    """Groups 0 and 1 of the newest version, group 2 of an older one that differs by `shift` nats per token."""
    samples = score(model, build_samples())
    new = set_version([sample for sample in samples if sample.group_index < 2], 4)
    return new + set_version([sample for sample in samples if sample.group_index == 2], 3, shift=shift)


def run_step(algorithm: AlgorithmSection, *, shift: float, version: int | None = 4, **settings):
    model = build_shallow()
    metrics = build_trainer(model, algorithm, **settings).step(build_mixed(model, shift=shift), policy_version=version)
    return metrics, read_parameters(model)


def test_mismatch_is_measured_on_tokens_of_the_newest_version():
    metrics, _ = run_step(AlgorithmSection(**GRPO), shift=0.7, mismatch_stop=1e-3)
    assert 0 <= metrics["mismatch/kl"] < 1e-9 and metrics["mismatch/max_log_ratio"] < 1e-4
    with pytest.raises(TrainingError, match="mismatch_stop"):
        run_step(AlgorithmSection(**GRPO), shift=0.7, version=3, mismatch_stop=1e-3)
    metrics, _ = run_step(AlgorithmSection(**GRPO), shift=0.7, version=9, mismatch_stop=1e-3)
    assert "mismatch/kl" not in metrics and metrics["train/num_updates"] == 1


def test_older_groups_get_truncated_importance_weights_by_default():
    """Tokens of the older policy have weight e^.7, truncated; those of the newest have weight 1."""
    metrics, _ = run_step(AlgorithmSection(**GRPO), shift=-0.7)
    num_old = sum(sum(s.is_sampled) for s in build_samples() if s.group_index == 2)
    num_all = sum(sum(s.is_sampled) for s in build_samples())
    assert metrics["correction/truncated_frac"] == pytest.approx(num_old / num_all)
    assert metrics["correction/mean_weight"] == pytest.approx((2 * num_old + num_all - num_old) / num_all, rel=1e-4)
    assert metrics["train/clip_frac"] == 0
    metrics, _ = run_step(AlgorithmSection(**GRPO, correction={"importance": "none"}), shift=-0.7)
    assert metrics["train/clip_frac"] > 0 and not any(name.startswith("correction") for name in metrics)


def test_fresh_data_and_off_policy_algorithms_get_no_importance_weights():
    model = build_shallow()
    samples = set_version(build_mixed(model, shift=0.0), 4)
    metrics = build_trainer(model, AlgorithmSection(**GRPO)).step(samples, policy_version=4)
    assert not any(name.startswith("correction") for name in metrics)
    metrics, _ = run_step(AlgorithmSection(algorithm_type="opmd"), shift=-0.7)
    assert not any(name.startswith("correction") for name in metrics)
    metrics, _ = run_step(AlgorithmSection(algorithm_type="opmd", correction={"importance": "token"}), shift=-0.7)
    assert metrics["correction/truncated_frac"] > 0


@pytest.mark.parametrize("algorithm_type", ["grpo", "reinforce"])
def test_correction_cancels_a_sampler_error_below_the_cap(algorithm_type):
    """Weight times ratio is 1: the update equals that of REINFORCE with exact sampler logprobs."""
    section = AlgorithmSection(algorithm_type=algorithm_type, correction={"importance": "token", "cap": 10.0})
    _, corrected = run_step(section, shift=-0.7)
    model = build_shallow()
    before = read_parameters(model)
    samples = [
        replace(s, advantages=tuple(2.0138 * a for a in s.advantages)) if s.group_index == 2 else s
        for s in build_mixed(model, shift=0.0)
    ]
    plain = AlgorithmSection(algorithm_type=algorithm_type, correction={"importance": "none"})
    build_trainer(model, plain).step(samples)
    expected = read_parameters(model)
    assert (corrected - expected).norm() < 1e-3 * (expected - before).norm()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_coef": 0.1},
        {"algorithm_type": "reinforce"},
        {"loss_args": {"clip_range_low": 0.01}},
        {"correction": {"importance": "token", "floor": 0.8}},
    ],
)
def test_weights_of_the_loss_pass_equal_those_of_a_forward_before_it(options):
    """In one update the policy of the loss pass is the proximal policy; a mask needs the forward and masks nothing."""
    reference = {"reference_model": build_shallow(seed=3)} if "kl_coef" in options else {}

    def run(**correction):
        model = build_shallow()
        samples = build_mixed(model, shift=0.4 if "correction" in options else -0.4)
        section = AlgorithmSection(**GRPO | options | {"correction": options.get("correction", {}) | correction})
        forwards = count_forwards(model)
        metrics = build_trainer(model, section, **reference).step(samples, policy_version=4)
        return metrics, read_parameters(model), len(forwards)

    late, late_weights, num_late = run()
    early, early_weights, num_early = run(mask=WIDE)
    assert (num_late, num_early) == (1, 2)
    assert early.pop("correction/masked_frac") == 0
    assert late == pytest.approx(early, rel=1e-4, abs=1e-6)
    assert ("correction/raised_frac" in late) == ("correction" in options)
    assert late.get("correction/raised_frac", 1) > 0
    before = read_parameters(build_shallow())
    assert (late_weights - early_weights).norm() < 1e-3 * (early_weights - before).norm()


@pytest.mark.parametrize("correction", [{"importance": "sequence"}, {"mask": WIDE}, {"negative_sequence_delta": 0.1}])
def test_weights_that_need_other_tokens_are_computed_before_the_loss_pass(correction):
    """`negative_sequence_delta` takes one more forward, for the logprobs of its mask."""
    model = build_shallow()
    samples, forwards = build_mixed(model, shift=-0.7), count_forwards(model)
    build_trainer(model, AlgorithmSection(**GRPO, correction=correction)).step(samples, policy_version=4)
    assert len(forwards) == (3 if "negative_sequence_delta" in correction else 2)


def test_tokens_of_a_quantized_sampler_are_weighted_as_off_policy():
    model = build_shallow()
    fresh = set_version(score(model, build_samples()), 4, shift=-0.7)
    metrics = build_trainer(model, AlgorithmSection(**GRPO), has_separate_sampler=True).step(fresh, policy_version=4)
    assert metrics["correction/truncated_frac"] == 1 and metrics["correction/mean_weight"] == pytest.approx(2)
    assert metrics["mismatch/kl"] > 0.1
    opmd = AlgorithmSection(algorithm_type="opmd")
    metrics = build_trainer(build_shallow(), opmd, has_separate_sampler=True).step(fresh, policy_version=4)
    assert not any(name.startswith("correction") for name in metrics)


def test_proximal_scores_are_those_of_the_step_start_in_every_minibatch():
    """With several updates per step the ratio leaves 1, and the weights stay those of the proximal policy."""
    one, _ = run_step(AlgorithmSection(**GRPO), shift=-0.7, learning_rate=1e-2)
    three, _ = run_step(AlgorithmSection(**GRPO), shift=-0.7, learning_rate=1e-2, num_minibatches=3)
    assert one["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(three["train/ppo_kl"]) > 1e-4
    assert three["correction/mean_weight"] == pytest.approx(one["correction/mean_weight"], rel=1e-4)


def test_adaptive_kl_coef_is_updated_and_resumed():
    section = AlgorithmSection(**GRPO, kl_coef=0.1, kl_adaptive={"target": 1e-4, "horizon": 24})
    samples, reference = build_samples(), build_shallow(seed=3)

    def build(model):
        return build_trainer(model, section, reference_model=reference, learning_rate=1e-2)

    whole, first = build_shallow(), build_shallow()
    trainer = build(whole)
    expected = [trainer.step(samples) for _ in range(4)]
    coefficients = [metrics["train/kl_coef"] for metrics in expected]
    assert coefficients[0] == 0.1
    assert coefficients[1] == pytest.approx(0.1 * (1 + 0.2 * 12 / 24))
    assert coefficients == sorted(coefficients)
    trainer = build(first)
    actual = [trainer.step(samples) for _ in range(2)]
    second, state = build_shallow(seed=5), copy.deepcopy(trainer.state_dict())
    second.load_state_dict(first.state_dict())
    resumed = build(second)
    resumed.load_state_dict(state)
    actual += [resumed.step(samples) for _ in range(2)]
    assert actual == expected and torch.equal(read_parameters(second), read_parameters(whole))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction": {"importance": "none", "cap": 3}}, "cap=3.0 has no effect on .* with importance='none'"),
        ({"algorithm_type": "opmd", "correction": {"cap": 3}}, "cap=3.0 has no effect on 'opmd' with .*'auto'"),
        ({"algorithm_type": "sft", "correction": {"cap": 3}}, "cap=3.0 has no effect on 'sft'"),
        (
            {"algorithm_type": "sft", "correction": {"importance": "token"}},
            "no effect with 'sft', which trains given completions",
        ),
    ],
)
def test_options_without_effect_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_trainer(algorithm=AlgorithmSection(**changes))


KL_COV = {"algorithm_type": "kl_cov", "terms_args": {"fraction": 0.5}}
PACKINGS = [{}, {"has_prefix_sharing": False}, {"max_tokens_per_row": 25}]


def step_kl_cov(samples: list[Sample], *, coef: float = 1.0, **settings):
    section = AlgorithmSection(**KL_COV, loss_args={"penalty_coef": coef})
    return build_trainer(build_shallow(dtype=torch.float32), section, **settings).step(samples)


@pytest.mark.parametrize("packing", PACKINGS)
def test_kl_cov_penalizes_no_rounding_of_tokens_that_the_policy_itself_sampled(packing):
    """Before the policy moves d is 0 by definition; its rounded value has a sign, which depends on packing."""
    samples = score(build_shallow(dtype=torch.float32), build_samples())
    found, plain = step_kl_cov(samples, **packing), step_kl_cov(samples, coef=0.0)
    assert found["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)
    assert found["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-5)
    assert found["train/kl_cov_frac"] == 0


def test_kl_cov_penalizes_what_later_updates_and_older_policies_moved():
    model = build_shallow(dtype=torch.float32)
    later = step_kl_cov(score(model, build_samples()), num_minibatches=2)
    assert later["train/kl_cov_frac"] > 0
    mixed = build_mixed(model, shift=-0.7)
    plain = AlgorithmSection(**KL_COV, correction={"importance": "none"})
    step = build_trainer(build_shallow(dtype=torch.float32), plain).step(mixed, policy_version=4)
    assert step["train/kl_cov_frac"] > 0
    # with importance weights the ratio is against the policy at the start of the step, which has not moved
    step = build_trainer(build_shallow(dtype=torch.float32), AlgorithmSection(**KL_COV)).step(mixed, policy_version=4)
    assert step["train/kl_cov_frac"] == 0 and step["correction/mean_weight"] > 1


def test_metrics_of_the_correction_are_means_over_the_tokens_of_a_step_with_one_update_or_several():
    """Without a change of the weights; minibatches have unequal numbers of tokens."""
    section = AlgorithmSection(**GRPO, correction={"mask": {"level": "token", "low": 0.9, "high": 1.1}})
    one, _ = run_step(section, shift=-0.7, learning_rate=1e-30)
    three, _ = run_step(section, shift=-0.7, learning_rate=1e-30, num_minibatches=3)
    names = [name for name in one if name.startswith("correction/")]
    assert names == ["correction/mean_weight", "correction/truncated_frac", "correction/masked_frac"]
    assert {name: three[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-6)
