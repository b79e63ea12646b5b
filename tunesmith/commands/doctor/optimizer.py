"""Checks of the optimizer, of fine-tuning as well as of reinforcement learning: weights that do not change; of the loss
of fine-tuning and preference training; and of the policy's drift: sampler and trainer mismatch, entropy, KL.
"""

from __future__ import annotations

import numpy as np

from tunesmith.commands.doctor.record import (
    AnyRun,
    CheckFinding,
    OfflineRun,
    Outcome,
    RlRun,
    compute_slope_t,
    find_longest_streak,
    format_settings,
    need_ends,
    observe,
    split_ends,
)
from tunesmith.commands.doctor.rewards import is_solved

MIN_RELATIVE_UPDATE = 1e-6
"""RMS of an update relative to that of the weights. A learning rate of 1e-6 gives 1e-5 to 1e-4; below 1e-6 a thousand
steps change the weights by less than a thousandth, a quarter of a step of bfloat16."""
TARGET_RELATIVE_UPDATE = 1e-4
DEAD_RATE_SHARE, MIN_DEAD_STEPS, MIN_DEAD_RUN_SHARE = 1e-3, 10, 0.1
"""Steps below a thousandth of the peak learning rate are dead; a cosine schedule has only 2 % of such steps."""


def find_dead_learning_rate(run: AnyRun) -> Outcome:
    """Updates too small to change the model, or a schedule that has ended."""
    rates = run.need("train/learning_rate")
    updates = run.get("train/relative_update")
    peak = run.config.trainer.peak_learning_rate
    if updates is not None and updates.values.max() < MIN_RELATIVE_UPDATE:
        observed = f"an update changes the weights by {updates.mean:.1g} of their size"
        size = max(updates.mean, np.finfo(np.float64).tiny)
        suggested = min(float(peak * TARGET_RELATIVE_UPDATE / size), 1e-5 if run.config.model.lora is None else 1e-4)
        settings: dict[str, object] = {"trainer.learning_rate": suggested}
        return CheckFinding(
            severity="error",
            problem=f"the updates are too small to change the model: {observed}",
            evidence=(
                observe(updates, observed),
                observe(rates, f"at most {rates.values.max():.2g}", rates.values.max()),
            ),
            change=f"set {format_settings(settings)}"
            + (", the usual size for an adapter" if run.config.model.lora else ""),
            settings=settings,
        )
    is_dead = rates.values < DEAD_RATE_SHARE * peak
    number = find_longest_streak(is_dead)
    if number >= max(MIN_DEAD_STEPS, MIN_DEAD_RUN_SHARE * len(rates)):
        dead = rates.select(is_dead)
        settings = {"trainer.schedule": "cosine", "trainer.min_lr_ratio": 0.1}
        return CheckFinding(
            problem=f"the learning rate was below a thousandth of its peak {peak:g} in {number} steps in a row",
            evidence=(observe(dead, f"{dead.mean:.1g} on average"),),
            change=f"set {format_settings(settings)}, and trainer.warmup_steps to less than a tenth of the steps",
            settings=settings,
        )
    observed = f"{rates.values[-1]:.2g} at the last step"
    observed += "" if updates is None else f", an update changes the weights by {updates.mean:.1g} of their size"
    return observed


MIN_LOSS_FALL = 0.05
"""A loss that falls by less than a twentieth has learned next to nothing."""
RISEN_T = 3.0


def find_loss_trend(run: OfflineRun) -> Outcome:
    """A training loss that rises or does not fall."""
    series = run.need("train/loss")
    first, last = need_ends(series)
    rate = run.config.trainer.peak_learning_rate
    observed = f"{first.mean:.3g} in the first steps, {last.mean:.3g} in the last"
    if last.mean > first.mean and compute_slope_t(series) > RISEN_T:
        problem, settings = "the training loss rises", {"trainer.learning_rate": rate / 10}
    elif last.mean > (1 - MIN_LOSS_FALL) * first.mean:
        problem, settings = "the training loss hardly falls", {"trainer.learning_rate": rate * 3}
    else:
        return observed
    return CheckFinding(
        problem=problem,
        evidence=(observe(series, observed, last.mean),),
        change=f"set {format_settings(settings)}, or train longer with num_epochs={run.config.num_epochs + 1}",
        settings=settings,
    )


MISMATCH_GROWTH, MIN_GROWN_MISMATCH = 10.0, 1e-3
"""bfloat16 alone gives 1e-4 to 2e-3 nats per token; growth within float32's 1e-12 means nothing."""
COLLAPSED_SHARE, COLLAPSED_ENTROPY = 0.1, 0.05
"""Entropy in nats per token below which almost every token is certain, and its share of the entropy at the start."""
RISEN_FACTOR, RISEN_NATS = 2.0, 1.0
"""Entropy that doubles and rises by a nat: the policy turns into noise."""
KL_RUNAWAY, KL_GROWTH = 0.5, 4.0
"""Nats per token to the starting model; useful runs stay near 0.1."""
KL_LIMIT = 2.0
"""At this KL the starting model gives the policy's tokens an eighth of their probability."""


def find_mismatch(run: RlRun) -> Outcome:
    """Sampler and trainer disagree about the probability of sampled tokens."""
    series = run.need("mismatch/kl")
    recent, ends, warn = series.recent, split_ends(series), run.config.trainer.mismatch_warn
    growth = 1.0 if ends is None or ends[0].mean <= 0 else ends[1].mean / ends[0].mean
    observed = f"{recent.mean:.2g} nats per token"
    has_grown = growth >= MISMATCH_GROWTH and ends is not None and ends[1].mean >= MIN_GROWN_MISMATCH
    if recent.mean < warn and not has_grown:
        return observed
    problem = f"sampler and trainer logprobs differ by {observed}, above trainer.mismatch_warn={warn:g}"
    if has_grown and ends is not None:
        problem = f"the mismatch of sampler and trainer has grown from {ends[0].mean:.2g} to {ends[1].mean:.2g} nats"
    settings: dict[str, object] = {"model.residual_dtype": "float32", "algorithm.correction.importance": "token"}
    if run.config.model.residual_dtype == "float32":
        settings["model.dtype"] = settings.pop("model.residual_dtype")
    return CheckFinding(
        problem=problem,
        evidence=(observe(series.recent, observed),),
        change=f"set {format_settings(settings)}; if gradients are large too, lower trainer.learning_rate",
        settings=settings,
    )


def find_entropy(run: RlRun) -> Outcome:
    """Entropy that collapsed before the tasks were solved, or that rises without bound."""
    series = run.need("train/entropy")
    first, last = need_ends(series)
    observed = f"{first.mean:.3g} nats per token in the first steps, {last.mean:.3g} in the last"
    evidence = (observe(series, observed, last.mean),)
    rate = run.config.trainer.peak_learning_rate
    if last.mean < COLLAPSED_ENTROPY and last.mean < COLLAPSED_SHARE * first.mean and not is_solved(run):
        coef = max(10 * run.config.algorithm.entropy_coef, 1e-3)
        settings = {"algorithm.entropy_coef": coef, "trainer.learning_rate": rate / 3}
        return CheckFinding(
            problem=f"entropy has collapsed to {last.mean / first.mean:.0%} of its start while tasks are unsolved: "
            "rollouts of a task hardly differ any more",
            evidence=evidence,
            change=f"resume from an earlier checkpoint under another name with {format_settings(settings)}",
            settings=settings,
        )
    if last.mean > RISEN_FACTOR * first.mean and last.mean - first.mean > RISEN_NATS:
        settings = {"trainer.learning_rate": rate / 10, "algorithm.entropy_coef": 0.0}
        return CheckFinding(
            problem="entropy has risen until the policy samples almost at random",
            evidence=evidence,
            change=f"start again with {format_settings(settings)}",
            settings=settings,
        )
    return observed


def find_kl(run: RlRun) -> Outcome:
    """The policy runs away from the model that it started from."""
    series = run.need("train/kl")
    recent, ends = series.last(max(3, len(series) // 5)), split_ends(series)
    observed = f"{recent.mean:.3g} nats per token to the starting model"
    has_grown = ends is not None and ends[1].mean > KL_GROWTH * max(ends[0].mean, 0.0)
    if not (recent.mean > KL_LIMIT or (recent.mean > KL_RUNAWAY and has_grown)):
        return observed
    rate, coef = run.config.trainer.peak_learning_rate, run.config.algorithm.kl_coef
    settings = {"trainer.learning_rate": rate / 10, "algorithm.kl_coef": 10 * coef}
    return CheckFinding(
        problem=f"the policy has run away from its start: KL is {recent.mean:.2g} nats per token",
        evidence=(observe(recent, observed),),
        change=f"start again with {format_settings(settings)}, or let the coefficient follow a target with "
        "algorithm.kl_adaptive.target=0.1",
        settings=settings,
    )
