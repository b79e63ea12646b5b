"""Checks of the policy's drift: sampler and trainer mismatch, entropy, KL, size of updates, replayed groups."""

from __future__ import annotations

from tunesmith.commands.doctor.finding import CheckFinding, Outcome, format_settings, observe
from tunesmith.commands.doctor.record import RlRun, need_ends, split_ends
from tunesmith.commands.doctor.rewards import is_solved

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
MAX_UPDATE_KL, MAX_CLIP_SHARE = 0.1, 0.3
"""Mean log-ratio of a token between its sampling and its update, and share of clipped tokens: PPO's usual stop is at
0.02 to 0.05."""
MAX_REPLAYED_SHARE = 0.5
MAX_TRUNCATED_WEIGHTS = 0.1


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
    rate = run.config.trainer.learning_rate
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
    rate, coef = run.config.trainer.learning_rate, run.config.algorithm.kl_coef
    settings = {"trainer.learning_rate": rate / 10, "algorithm.kl_coef": 10 * coef}
    return CheckFinding(
        problem=f"the policy has run away from its start: KL is {recent.mean:.2g} nats per token",
        evidence=(observe(recent, observed),),
        change=f"start again with {format_settings(settings)}, or let the coefficient follow a target with "
        "algorithm.kl_adaptive.target=0.1",
        settings=settings,
    )


def find_large_updates(run: RlRun) -> Outcome:
    """Updates that move the policy far from the one that sampled."""
    kl, clipped = run.get_recent("train/ppo_kl"), run.get_recent("train/clip_frac")
    found = [series for series in (kl, clipped) if series is not None]
    if not found:
        return None
    size, share = abs(kl.mean) if kl is not None else 0.0, clipped.mean if clipped is not None else 0.0
    observed = f"mean log-ratio {size:.2g}, {share:.1%} of the tokens clipped"
    if size < MAX_UPDATE_KL and share < MAX_CLIP_SHARE:
        return observed
    settings: dict[str, object] = {"trainer.learning_rate": run.config.trainer.learning_rate / 3}
    if run.config.trainer.num_minibatches > 1:
        settings["trainer.num_minibatches"] = max(1, run.config.trainer.num_minibatches // 2)
    return CheckFinding(
        problem="the updates of a step move the policy too far from the one that sampled its rollouts",
        evidence=tuple(observe(series, f"{series.mean:.2g} on average", series.mean) for series in found),
        change=f"set {format_settings(settings)}",
        settings=settings,
    )


def find_stale_samples(run: RlRun) -> Outcome:
    """Replay of old groups that the policy has moved away from."""
    if not run.config.experience.replay.num_groups:
        return None
    recent, trained = run.need_recent("experience/num_replayed_groups"), run.sum_recent("algorithm/num_trained_groups")
    share = recent.total / trained if trained else 0.0
    truncated = run.get_recent("correction/truncated_frac")
    cut = 0.0 if truncated is None else truncated.mean
    observed = f"{share:.0%} of the trained groups are replayed, {cut:.1%} of their importance weights truncated"
    if share <= MAX_REPLAYED_SHARE and cut <= MAX_TRUNCATED_WEIGHTS:
        return observed
    replay = run.config.experience.replay
    settings: dict[str, object] = {"experience.replay.max_staleness": max(1, replay.max_staleness // 2)}
    if share > MAX_REPLAYED_SHARE:
        settings["experience.replay.num_groups"] = max(1, replay.num_groups // 2)
    return CheckFinding(
        problem="much of what is trained was sampled by older policies",
        evidence=(observe(recent, observed, share),),
        change=f"set {format_settings(settings)}",
        settings=settings,
    )
