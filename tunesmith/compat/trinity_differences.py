"""Settings that differ between Trinity-RFT and Tunesmith under the same name.

If our arguments can express Trinity-RFT's meaning, they are set; otherwise a note is added. There are two kinds: loss
formulas that differ under one name, and defaults of keys that the file leaves out. Runs after the rules of single keys.
"""

from __future__ import annotations

from typing import Any

from tunesmith.compat.trinity_algorithms import DEFAULT_KL_COEF, find_algorithm
from tunesmith.compat.trinity_draft import Draft, read_mapping
from tunesmith.config import AlgorithmSection, EvaluationSection, RolloutSection, RunConfig, TrainerSection

WITHOUT_KL = frozenset(
    {"dapo", "asymre", "sppo", "raft", "on_policy_distill", "jsd", "sft", "sft_is", "sft_phi", "remax", "m2po"}
)
"""Algorithms without a KL to the starting model in Trinity-RFT, or without a default for it."""
DEFAULT_MU = 0.1
DIFFERENT_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "algorithm.repeat_times": (AlgorithmSection().group_size, 1),
    "algorithm.optimizer.weight_decay": (TrainerSection().weight_decay, 0.01),
    "buffer.batch_size": (AlgorithmSection().batch_size, 1),
    "explorer.max_timeout": (RolloutSection().timeout_s, 1800),
    "explorer.max_retry_times": (0, 2),
    "explorer.eval_on_startup": (EvaluationSection().at_start, True),
    "trainer.save_interval": (RunConfig.model_fields["save_interval_steps"].default, 0),
}
"""Key -> our default and Trinity-RFT's; noted if the file has the key's section but not the key."""
SEQUENCES = "a sequence is a whole rollout with all its model calls (in Trinity-RFT each model call is one)"


def resolve_differences(draft: Draft) -> None:
    """Keep the file's meaning if our arguments can express it, and add notes on what differs."""
    if read_mapping(draft.find("algorithm"), "algorithm"):
        name = find_algorithm(draft)
        resolvers = {"rec": _resolve_rec, "mix_chord": _resolve_chord, "gigpo": _resolve_gigpo, "topr": _resolve_topr}
        resolve = resolvers.get(name)
        if resolve is not None:
            resolve(draft)
        _note_losses(draft, name)
        _note_aggregation(draft, name)
    _note_defaults(draft)
    _note_selectors(draft)


def _resolve_rec(draft: Draft) -> None:
    """In Trinity-RFT, `gspo-one-side` always uses seq-mean-token-mean, whatever `loss_agg_mode` is."""
    if draft.find("algorithm.policy_loss_fn_args.clip_mode") != "gspo-one-side":
        return
    given = _section(draft, "algorithm").get("loss_aggregation")
    draft.set("algorithm.loss_aggregation", "seq-mean-token-mean", source="clip_mode", is_finer=True)
    if given not in (None, "seq-mean-token-mean"):
        draft.notes.append(
            f"loss_agg_mode={given!r} has no effect: clip_mode='gspo-one-side' uses seq-mean-token-mean, as in "
            "Trinity-RFT"
        )


def _resolve_chord(draft: Draft) -> None:
    """In Trinity-RFT, mu is `mu_valley` once the decay is over; a decay of 0 steps is over at once."""
    terms = _section(draft, "algorithm", "terms_args")
    peak, valley = terms.get("mu_peak", DEFAULT_MU), terms.get("mu_valley", DEFAULT_MU)
    if terms.get("mu_decay_steps") or peak == valley:
        return
    key = "algorithm.policy_loss_fn_args.mu_decay_steps=0"
    if terms.get("mu_warmup_steps"):
        terms["mu_decay_steps"] = 1
        draft.notes.append(
            f"{key}: mu falls from mu_peak to mu_valley one step after the warm-up; in Trinity-RFT it falls when the "
            "warm-up ends"
        )
    else:
        terms["mu_peak"] = valley
        draft.notes.append(
            f"{key}: mu is mu_valley={valley} from the first step, as in Trinity-RFT; mu_peak has no effect"
        )


def _resolve_gigpo(draft: Draft) -> None:
    _section(draft, "algorithm", "advantage_args").setdefault("gamma", 1.0)
    draft.notes.append(
        "gigpo: a turn is compared with turns of the same task that have the same prompt, or the same value of the "
        "metric advantage_args.env_state_hash_key; Trinity-RFT compares all turns of a batch with the same "
        "env_state_hash"
    )


def _resolve_topr(draft: Draft) -> None:
    """Trinity-RFT uses token-level ratios; our default is the sequence-level ratio of the paper."""
    _section(draft, "algorithm", "terms_args").setdefault("ratio_level", "token")


def _note_losses(draft: Draft, name: str) -> None:
    if name == "sapo":
        draft.notes.append(
            "sapo: the gate is differentiated, as in the paper, so at ratio 1 the gradient is the policy gradient; in "
            "Trinity-RFT the gate is a constant weight of the gradient: at ratio 1 it is 2 for A > 0 and 1.9 for "
            "A <= 0"
        )
    if name in ("mix", "mix_chord"):
        draft.notes.append(
            f"{name}: the losses of rollouts and of demonstrations are averaged separately, independent of "
            "micro-batches, so the batch sizes in policy_loss_fn_args are not needed"
        )


def _note_aggregation(draft: Draft, name: str) -> None:
    from tunesmith.algorithms.table import ALGORITHMS  # imports torch, which run files of our own do without

    own = ALGORITHMS[name].aggregation if name in ALGORITHMS else "token-mean"
    given = _section(draft, "algorithm").get("loss_aggregation")
    if given is None and own not in ("token-mean", "sum"):
        draft.notes.append(
            f"loss_agg_mode is not set: {name} uses {own}, as in its paper; Trinity-RFT uses token-mean; {SEQUENCES}"
        )
    elif given == "seq-mean-token-sum-norm":
        draft.notes.append(
            f"loss_agg_mode={given!r}: the sum over tokens is divided by the number of sequences and by "
            "model.max_model_len; Trinity-RFT divides it only by the longest answer of the micro-batch; "
            f"{SEQUENCES}"
        )
    elif given is not None and given.startswith("seq-mean"):
        draft.notes.append(f"loss_agg_mode={given!r}: {SEQUENCES}")


def _note_defaults(draft: Draft) -> None:
    """One note on all defaults that differ, and one on a second run of the same name."""
    differing = [
        f"{key} is {ours} (Trinity-RFT: {theirs})"
        for key, (ours, theirs) in DIFFERENT_DEFAULTS.items()
        if ours != theirs and draft.find(key) is None and draft.find(key.partition(".")[0]) is not None
    ]
    if draft.find("algorithm") is not None and _lacks_kl(draft):
        differing.append(
            f"algorithm.kl_loss_fn is none (Trinity-RFT: k2 with kl_coef {DEFAULT_KL_COEF}, and a reference model)"
        )
    if differing:
        draft.notes.append("keys that are not set have other defaults than in Trinity-RFT: " + "; ".join(differing))
    if draft.find("name") is not None and not draft.find("continue_from_checkpoint"):
        theirs = "resumes it" if draft.find("continue_from_checkpoint") is None else "gives it a new name"
        draft.notes.append(
            "a second run of this name is refused, so that the first is not overwritten (Trinity-RFT "
            f"{theirs}): resume with --resume or continue_from_checkpoint: true"
        )


def _lacks_kl(draft: Draft) -> bool:
    is_given = any(draft.find(f"algorithm.{key}") is not None for key in ("kl_loss_fn", "kl_loss_fn_args"))
    return not is_given and find_algorithm(draft) not in WITHOUT_KL


def _note_selectors(draft: Draft) -> None:
    """Notes on the task selectors of training sets; an evaluation runs every task."""
    train = "train_dataset"
    sets = {train: draft.values[train]} if train in draft.values else draft.values.get("train_datasets", {})
    for name, section in sets.items():
        selector = section.get("task_selector", {})
        kind = selector.get("selector_type")
        where = "the training set" if name == train else f"training set {name!r}"
        if kind is None:
            draft.notes.append(
                f"{where} has no task_selector: tasks are shuffled in each epoch; Trinity-RFT takes them in the order "
                "of the file (selector_type: sequential)"
            )
        elif kind == "random" and not read_mapping(selector.get("args"), "kwargs").get("replace"):
            draft.notes.append(
                f"{where}: selector random draws each batch without replacement, independently of other batches; "
                "kwargs: {replace: true} draws with replacement"
            )


def _section(draft: Draft, *names: str) -> dict[str, Any]:
    section: Any = draft.values
    for name in names:
        section = section.setdefault(name, {})
    assert isinstance(section, dict)
    return section
