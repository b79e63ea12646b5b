"""Where a Trinity-RFT file would mean something else here: the same meaning if our arguments can say it, else a note.

Two kinds: forms of a loss that differ under one name, and defaults of keys that the file leaves out. Runs after the
rules of single keys, on what they made of the file.
"""

from __future__ import annotations

from typing import Any

from tunesmith.compat.trinity_algorithms import DEFAULT_KL_COEF, find_algorithm
from tunesmith.compat.trinity_draft import Draft, read_mapping
from tunesmith.config import AlgorithmSection, EvaluationSection, RolloutSection, RunConfig, TrainerSection

WITHOUT_KL = frozenset(
    {"dapo", "asymre", "sppo", "raft", "on_policy_distill", "jsd", "sft", "sft_is", "sft_phi", "remax", "m2po"}
)
"""Algorithms that have no KL to the starting model there, or no default that says."""
DEFAULT_MU = 0.1
LEFT_OUT: dict[str, tuple[Any, Any]] = {
    "algorithm.repeat_times": (AlgorithmSection().group_size, 1),
    "algorithm.optimizer.weight_decay": (TrainerSection().weight_decay, 0.01),
    "buffer.batch_size": (AlgorithmSection().batch_size, 1),
    "explorer.max_timeout": (RolloutSection().timeout_s, 1800),
    "explorer.max_retry_times": (0, 2),
    "explorer.eval_on_startup": (EvaluationSection().at_start, True),
    "trainer.save_interval": (RunConfig.model_fields["save_interval_steps"].default, 0),
}
"""Keys whose defaults differ, ours and theirs; noted where the file has the key's section but not the key."""
SEQUENCES = "a sequence is a whole run, all its model calls together (there each call is one)"


def settle_differences(draft: Draft) -> None:
    """Keep the file's meaning where our arguments have it, and note what differs."""
    if read_mapping(draft.find("algorithm"), "algorithm"):
        name = find_algorithm(draft)
        settle = {"rec": _settle_rec, "mix_chord": _settle_chord, "gigpo": _settle_gigpo, "topr": _settle_topr}.get(
            name
        )
        if settle is not None:
            settle(draft)
        _note_forms(draft, name)
        _note_aggregation(draft, name)
    _note_defaults(draft)
    _note_selectors(draft)


def _settle_rec(draft: Draft) -> None:
    """There the sequence's clip brings its aggregation along, whatever else the file says."""
    if draft.find("algorithm.policy_loss_fn_args.clip_mode") != "gspo-one-side":
        return
    given = _section(draft, "algorithm").get("loss_aggregation")
    draft.set("algorithm.loss_aggregation", "seq-mean-token-mean", source="clip_mode", is_finer=True)
    if given not in (None, "seq-mean-token-mean"):
        draft.notes.append(
            f"loss_agg_mode={given!r} has no effect: clip_mode='gspo-one-side' goes with seq-mean-token-mean, as there"
        )


def _settle_chord(draft: Draft) -> None:
    """There mu is at the valley as soon as the decay is over, and a decay of no steps is over at once."""
    terms = _section(draft, "algorithm", "terms_args")
    peak, valley = terms.get("mu_peak", DEFAULT_MU), terms.get("mu_valley", DEFAULT_MU)
    if terms.get("mu_decay_steps") or peak == valley:
        return
    key = "algorithm.policy_loss_fn_args.mu_decay_steps=0"
    if terms.get("mu_warmup_steps"):
        terms["mu_decay_steps"] = 1
        draft.notes.append(f"{key}: mu falls from mu_peak to mu_valley one step after the warm-up (there with its end)")
    else:
        terms["mu_peak"] = valley
        draft.notes.append(f"{key}: mu is mu_valley={valley} from the first step, as there; mu_peak has no effect")


def _settle_gigpo(draft: Draft) -> None:
    _section(draft, "algorithm", "advantage_args").setdefault("gamma", 1.0)
    draft.notes.append(
        "gigpo: a turn is compared with turns of its task that have the same prompt, or the same metric "
        "(advantage_args.env_state_hash_key); there with all turns of a batch that report one env_state_hash"
    )


def _settle_topr(draft: Draft) -> None:
    """There each token has its own ratio; the paper's, which is our default, is that of the sequence."""
    _section(draft, "algorithm", "terms_args").setdefault("ratio_level", "token")


def _note_forms(draft: Draft, name: str) -> None:
    if name == "sapo":
        draft.notes.append(
            "sapo: the gate is differentiated, as in the paper, so at ratio 1 the gradient is the policy gradient; "
            "there the gate is a constant weight of it, at ratio 1 it is 2 for A > 0 and 1.9 for A <= 0"
        )
    if name in ("mix", "mix_chord"):
        draft.notes.append(
            f"{name}: a step's own runs and its demonstrations are averaged by themselves, whatever the micro-batches; "
            "batch sizes need not be repeated in policy_loss_fn_args"
        )


def _note_aggregation(draft: Draft, name: str) -> None:
    from tunesmith.algorithms.table import ALGORITHMS  # imports torch, which run files of our own do without

    own = ALGORITHMS[name].aggregation if name in ALGORITHMS else "token-mean"
    given = _section(draft, "algorithm").get("loss_aggregation")
    if given is None and own not in ("token-mean", "sum"):
        draft.notes.append(
            f"{name} left out loss_agg_mode: it is {own}, as in its paper (there token-mean); {SEQUENCES}"
        )
    elif given == "seq-mean-token-sum-norm":
        draft.notes.append(
            f"loss_agg_mode={given!r}: the sum over tokens is divided by the number of sequences and by "
            f"model.max_model_len (there by the longest answer of the micro-batch alone); {SEQUENCES}"
        )
    elif given is not None and given.startswith("seq-mean"):
        draft.notes.append(f"loss_agg_mode={given!r}: {SEQUENCES}")


def _note_defaults(draft: Draft) -> None:
    """One note of all defaults that differ, and one of what a second run does."""
    told = [
        f"{key} is {ours} (there {theirs})"
        for key, (ours, theirs) in LEFT_OUT.items()
        if ours != theirs and draft.find(key) is None and draft.find(key.partition(".")[0]) is not None
    ]
    if draft.find("algorithm") is not None and _lacks_kl(draft):
        told.append(f"algorithm.kl_loss_fn is none (there k2 with kl_coef {DEFAULT_KL_COEF}, and a reference model)")
    if told:
        draft.notes.append("left out, and other than Trinity-RFT's default: " + "; ".join(told))
    if draft.find("name") is not None and not draft.find("continue_from_checkpoint"):
        resumed = "there it is resumed" if draft.find("continue_from_checkpoint") is None else "there it is renamed"
        draft.notes.append(
            "a second run of this name is refused, so that none is overwritten: resume it with --resume or "
            f"continue_from_checkpoint: true ({resumed})"
        )


def _lacks_kl(draft: Draft) -> bool:
    is_given = any(draft.find(f"algorithm.{key}") is not None for key in ("kl_loss_fn", "kl_loss_fn_args"))
    return not is_given and find_algorithm(draft) not in WITHOUT_KL


def _note_selectors(draft: Draft) -> None:
    """Of training sets; an evaluation tries every task."""
    train = "train_dataset"
    sets = {train: draft.values[train]} if train in draft.values else draft.values.get("train_datasets", {})
    for name, section in sets.items():
        selector = section.get("task_selector", {})
        kind = selector.get("selector_type")
        where = "the training set" if name == train else f"training set {name!r}"
        if kind is None:
            draft.notes.append(
                f"{where} names no selector: tasks are shuffled anew in each epoch (there in the file's order, "
                "selector_type: sequential)"
            )
        elif kind == "random" and not read_mapping(selector.get("args"), "kwargs").get("replace"):
            draft.notes.append(
                f"{where}: a random batch holds a task at most once, and batches are independent; kwargs: "
                "{replace: true} draws with replacement"
            )


def _section(draft: Draft, *names: str) -> dict[str, Any]:
    place: Any = draft.values
    for name in names:
        place = place.setdefault(name, {})
    assert isinstance(place, dict)
    return place
