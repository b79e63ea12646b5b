"""Trinity-RFT's files of offline training, sft and dpo in mode train, as files of `tunesmith sft` and `prefer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.compat.trinity_draft import Draft, Rule, accept, allow, move

BUFFER = "buffer.trainer_input.experience_buffer"
COMMANDS = {"sft": "sft", "sft_is": "sft", "sft_phi": "sft", "dpo": "prefer"}
"""Algorithm on given rows -> the command that trains with it."""
COLUMNS = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected", "messages_key": "messages"}
KEPT = {
    "model": ("path", "max_model_len", "dtype", "lora", "chat_template"),
    "trainer": (
        "learning_rate", "warmup_steps", "warmup_ratio", "min_lr_ratio", "schedule", "betas", "weight_decay",
        "max_grad_norm", "max_tokens_per_row", "has_gradient_checkpointing",
    ),
    "monitor": ("trackers",),
}  # fmt: skip
"""Keys of translated sections that offline training has; the others are of sampling."""


def build_buffer_rules() -> Mapping[str, Rule]:
    columns: dict[str, Rule] = {
        f"format.{name}": allow(column, reason=f"rows have the field {column!r}; rename the column")
        for name, column in COLUMNS.items()
    }
    return columns | {
        "name": accept(),
        "storage_type": allow("file", reason="rows are read from files and from the hub"),
        "path": move("train_dataset.path"),
        "subset_name": move("train_dataset.name"),
        "split": move("train_dataset.split"),
        "schema_type": allow("sft", "dpo", reason="rows are conversations or pairs"),
        "format.prompt_type": allow("messages", "plaintext", reason="rows have messages, or text of pairs"),
        "enable_progress_bar": accept(),
        "total_epochs": accept("buffer.total_epochs is the number of epochs"),
    }


def find_command(values: Mapping[str, Any]) -> str | None:
    """The command that trains a file's algorithm on given rows; None if it samples."""
    draft = Draft(values)
    is_offline = (
        str(draft.find("mode", "both")).casefold() == "train" and draft.find(f"{BUFFER}.storage_type") == "file"
    )
    return COMMANDS.get(draft.find("algorithm.algorithm_type", "")) if is_offline else None


def convert_to_offline(draft: Draft) -> dict[str, Any]:
    """The values of a file of `sft` or `prefer`, from those of a run file and its rows."""
    given = draft.values
    values: dict[str, Any] = {
        section: {name: each for name, each in given.get(section, {}).items() if name in names}
        for section, names in KEPT.items()
    }
    algorithm = draft.find("algorithm.algorithm_type")
    beta = given.get("algorithm", {}).get("loss_args", {}).get("beta")
    if beta is not None:
        values["terms_args"] = {"beta": beta}
    if draft.find("algorithm.kl_loss_fn_args.kl_coef"):
        draft.notes.append(
            "algorithm.kl_loss_fn_args has no effect: policy_loss_fn_args.beta bounds the distance of dpo"
        )
    if given.get("cluster"):
        draft.notes.append(f"cluster has no effect: `tunesmith {COMMANDS[algorithm]}` trains on one GPU")
    moved = {
        "train_dataset": given.get("train_dataset"),
        "num_epochs": given.get("total_epochs"),
        "max_steps": given.get("total_steps"),
        "max_rows_per_batch": draft.find("buffer.train_batch_size"),
        "save_interval_steps": given.get("save_interval_steps"),
        "keep_checkpoints": given.get("keep_checkpoints"),
        "seed": given.get("seed"),
        "algorithm_type": algorithm,
    }
    values |= {name: each for name, each in moved.items() if each is not None}
    if "max_rows_per_batch" in values:  # the rows alone limit a batch, as in Trinity-RFT
        length = values["model"].get("max_model_len")
        values |= {} if length is None else {"max_tokens_per_batch": length * values["max_rows_per_batch"]}
    return {name: each for name, each in values.items() if each not in ({}, None)}
