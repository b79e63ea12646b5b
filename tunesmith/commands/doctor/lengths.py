"""Checks of lengths: truncated responses, prompts that do not fit, responses that grow."""

from __future__ import annotations

from tunesmith.commands.doctor.finding import CheckFinding, Evidence, Outcome, observe
from tunesmith.commands.doctor.record import RlRun, compute_slope_t, need_ends
from tunesmith.types import TRUNCATED

MAX_TRUNCATED_SHARE = 0.1
"""A few answers always ramble; from a tenth on the reward is partly a reward for brevity."""
MOSTLY_TRUNCATED_SHARE = 0.9
"""So few answers end that the judge sees hardly a whole one."""
MAX_REFUSED_SHARE = 0.01
GROWTH = 1.5
"""Responses that grow by half without a higher reward."""
NEAR_LIMIT = 0.8


def find_truncation(run: RlRun) -> Outcome:
    """Responses cut off by `max_tokens` or the context."""
    truncated, total = run.sum_recent("rollout/num_truncated"), run.sum_recent("rollout/num_trajectories")
    source, unit = "rollout/num_truncated", "rollouts"
    length, context = (run.need_recent(f"rollout/num_stop_{name}").total for name in ("length", "context"))
    if truncated is None:  # runs of earlier versions count turns only
        truncated, total = length + context, run.sum_recent("rollout/num_turns")
        source, unit = "rollout/num_stop_length", "turns"
    if not total:
        return None
    recent = run.need_recent(source)
    share, longest = truncated / total, run.get_recent("rollout/sampled_tokens_per_turn_max")
    longest_text = "" if longest is None else f", the longest turn has {longest.values.max():.0f} tokens"
    if share < MAX_TRUNCATED_SHARE:
        return f"{share:.1%} of recent {unit} were truncated{longest_text}"
    model = run.config.model
    is_context = context > length or 2 * model.max_tokens > model.max_model_len
    knob = "model.max_model_len" if is_context else "model.max_tokens"
    value = 2 * (model.max_model_len if is_context else model.max_tokens)
    limit = f"the context, model.max_model_len={model.max_model_len}"
    if context <= length:
        limit = f"model.max_tokens={model.max_tokens}"
    settings: dict[str, object] = {knob: value}
    if is_context and length >= context:
        settings["model.max_tokens"] = 2 * model.max_tokens
    listed = " and ".join(f"{each}={number}" for each, number in settings.items())
    evidence = [
        observe(recent, f"{truncated:.0f} of {total:.0f} {unit}{longest_text}", share),
        Evidence(
            source="rollout/num_stop_context",
            observed=f"{context:.0f} turns ended at the end of the context, {length:.0f} at max_tokens",
            steps=recent.span,
        ),
    ]
    evidence += find_truncated_rollout(run)
    return CheckFinding(
        severity="error" if share >= MOSTLY_TRUNCATED_SHARE else "warning",
        problem=f"{share:.0%} of the recent {unit} were cut off at {limit}",
        evidence=tuple(evidence),
        change=f"set {listed}; if longer answers are not wanted, add experience.operators mask_response_truncated, so "
        "that a truncated answer is not trained as a wrong one",
        settings=settings,
    )


def find_truncated_rollout(run: RlRun) -> list[Evidence]:
    """A reference to a truncated rollout, if the rollouts are on disk."""
    for step in run.rollouts.list_steps()[-1:]:
        for row in run.rollouts.read_table(step, ("task_id", "run_index", "turns.stop_reason")).to_pylist():
            if row["turns"] and row["turns"][-1]["stop_reason"] in TRUNCATED:
                observed = f"task {row['task_id']}, run {row['run_index']} was truncated"
                return [Evidence(source=f"rollouts/step_{step:06d}.parquet", observed=observed, steps=(step, step))]
    return []


def find_refused_prompts(run: RlRun) -> Outcome:
    """Model calls refused because the prompt leaves no room for a token."""
    recent, num_calls, share = run.need_share("rollout/num_overlong", "rollout/num_calls")
    if share < MAX_REFUSED_SHARE:
        return f"{recent.total:.0f} of {num_calls:.0f} recent calls had too long a prompt"
    value = 2 * run.config.model.max_model_len
    return CheckFinding(
        problem=f"{share:.0%} of the model calls were refused because their prompt fills the context",
        evidence=(observe(recent, f"{recent.total:.0f} of {num_calls:.0f} calls", share),),
        change=f"set model.max_model_len={value}, or let the workflow shorten its history and tool results",
        settings={"model.max_model_len": value},
    )


def find_length_growth(run: RlRun) -> Outcome:
    """Responses that get longer while the reward does not rise, near their limit."""
    lengths, rewards = run.need("rollout/sampled_tokens_per_turn_mean"), run.need("rollout/reward_mean")
    first, last = need_ends(lengths)
    observed = f"{first.mean:.0f} tokens a turn in the first steps, {last.mean:.0f} in the last"
    is_longer = last.mean > GROWTH * first.mean and compute_slope_t(lengths) > 2
    if not is_longer or len(rewards) < 3 or compute_slope_t(rewards) > 1:
        return observed
    return CheckFinding(
        severity="warning" if last.mean > NEAR_LIMIT * run.config.model.max_tokens else "note",
        problem="responses get longer and the reward does not rise",
        evidence=(observe(lengths, observed, last.mean),),
        change="set algorithm.algorithm_type=dr_grpo, whose loss does not favour long wrong answers, and "
        "experience.operators mask_response_truncated",
        settings={"algorithm.algorithm_type": "dr_grpo"},
    )
