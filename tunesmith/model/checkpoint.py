"""Checkpoints: one step of a run on disk, committed atomically by a rename.

`AutoModelForCausalLM.from_pretrained` loads the folder `global_step_N/`; with a trained adapter,
`PeftModel.from_pretrained` does. Beside the weights are `trainer/` (optimizer, counters) and `DONE.json`, written last,
which lists every file with its size and checksum. Everything is written to `global_step_N.tmp-<pid>`, fsynced and
renamed, so a folder without the suffix is complete; the next start removes what a killed save leaves. Restoring copies
into the existing parameters, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tunesmith.errors import StorageError
from tunesmith.model.adapters.adapter import copy_state, has_adapter
from tunesmith.model.towers import copy_processor
from tunesmith.storage import (
    DONE,
    check_free_space,
    check_sizes,
    find_checkpoints,
    load_json,
    new_folder,
    parse_checkpoint_step,
    remove_tree,
    save_json,
    storage_errors,
)

TRAINER_FOLDER = "trainer"
TRAINER_STATE = f"{TRAINER_FOLDER}/state.pt"
RUN_STATE = f"{TRAINER_FOLDER}/run_state.json"
SMALL_FILES_BYTES = 64 * 2**20
"""Allowance for config, tokenizer and file format overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredState:
    """Contents of a checkpoint in addition to the weights, as passed to `save_checkpoint`."""

    trainer_state: dict[str, Any]
    run_state: dict[str, Any]


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trainer_state: Mapping[str, Any],
    run_state: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write and commit `folder`, named `global_step_N`; on an error nothing changes on disk.

    `trainer_state` holds tensors, numbers, strings, and lists and mappings of them; `run_state` is JSON. `weights` is
    the state of a model that is sharded over ranks; None: that of `model`.
    """
    step = parse_checkpoint_step(folder)
    if (folder / DONE).exists():
        raise StorageError(f"{folder} already holds a checkpoint; nothing was written")
    with new_folder(folder, {"step": step}) as temporary:
        check_free_space(temporary, estimate_checkpoint_bytes(model, trainer_state, weights=weights))
        save_model_files(temporary, model, tokenizer, weights=weights)
        (temporary / TRAINER_STATE).parent.mkdir()
        try:
            torch.save(dict(trainer_state), temporary / TRAINER_STATE)
        except RuntimeError as error:  # torch's file writer reports operating system errors as RuntimeError
            raise StorageError(describe_failed_write(temporary, error)) from error
        save_json(temporary / RUN_STATE, dict(run_state))
        if folder.exists():
            remove_tree(folder)


def load_checkpoint(folder: Path, model: PreTrainedModel) -> RestoredState:
    """Copy a checkpoint's weights into the parameters of `model` in place; return the other states, tensors on the CPU.

    File sizes are checked here; `check_complete` also reads every file and compares checksums.
    """
    check_sizes(folder)
    restore_weights(folder, model)
    return load_states(folder)


def load_states(folder: Path, *, is_mapped: bool = False) -> RestoredState:
    """The states of a checkpoint in addition to the weights, tensors on the CPU; `is_mapped`: read when used."""
    with storage_errors(folder, "read"):
        trainer_state = torch.load(folder / TRAINER_STATE, map_location="cpu", weights_only=True, mmap=is_mapped)
    return RestoredState(trainer_state=trainer_state, run_state=load_json(folder / RUN_STATE))


def remove_old_checkpoints(run_root: Path, *, num_kept: int, best_step: int | None = None) -> None:
    """Remove all checkpoints but the newest `num_kept` and the one of `best_step`."""
    checkpoints = find_checkpoints(run_root)
    for folder in checkpoints[: max(len(checkpoints) - num_kept, 0)]:
        if parse_checkpoint_step(folder) != best_step:
            remove_tree(folder)


def save_model_files(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Save weights, configs and tokenizer as Hugging Face files; with an active adapter, only the adapter's weights."""
    generation_config = model.generation_config
    try:
        if has_adapter(model):
            from tunesmith.model.adapters.lora import save_adapter  # PEFT takes seconds to import

            save_adapter(folder, model)
        else:
            with hidden_progress_bars():
                # save_pretrained refuses some published configs (temperature without do_sample): write it unchecked.
                model.generation_config = GenerationConfig()
                model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
            copy_processor(model, folder)
            generation_config.to_json_file(folder / "generation_config.json")
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise StorageError(describe_failed_write(folder, error)) from error
    finally:
        model.generation_config = generation_config


def describe_failed_write(folder: Path, error: Exception) -> str:
    reason = str(error).split("\n")[0]
    free = shutil.disk_usage(folder).free
    return f"cannot write the checkpoint in {folder.parent}: {reason}; {free} bytes are free there"


def restore_weights(folder: Path, model: PreTrainedModel) -> None:
    """Load the checkpoint on the CPU and copy every saved parameter and buffer into the model."""
    if has_adapter(model):
        from tunesmith.model.adapters.lora import restore_adapter  # PEFT takes seconds to import

        restore_adapter(folder, model)
        return
    copy_state(load_model_state(folder, model), model.state_dict())


def load_model_state(
    folder: Path, model: PreTrainedModel, *, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The state of a checkpoint of this model, on the CPU; `dtype`: of its weights, if other than the model's."""
    with hidden_progress_bars():
        try:
            loaded, report = type(model).from_pretrained(folder, dtype=dtype or model.dtype, output_loading_info=True)
        except SafetensorError as error:
            raise StorageError(f"cannot read the weights in {folder}: {error}") from error
    missing = sorted(report["missing_keys"])
    source: dict[str, torch.Tensor] = loaded.state_dict()
    differing = [
        name
        for name, tensor in model.state_dict().items()
        if name not in source
        or source[name].shape != tensor.shape
        or (dtype is None and source[name].dtype != tensor.dtype)
    ]
    if missing or differing:
        named = ", ".join((missing + differing)[:3])
        raise StorageError(f"{folder} does not hold the weights of this model: {named} missing or of another shape")
    return source


def estimate_checkpoint_bytes(
    model: PreTrainedModel,
    trainer_state: Mapping[str, Any],
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> int:
    """Approximate size of what `save_checkpoint` writes."""
    saved = (model.state_dict() if weights is None else weights).values()
    if has_adapter(model):
        saved = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tensors = [*saved, *iter_tensors(trainer_state)]
    unique = {(tensor.data_ptr(), tensor.device, tensor.nbytes): tensor.nbytes for tensor in tensors}
    return sum(unique.values()) + SMALL_FILES_BYTES


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from iter_tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from iter_tensors(inner)


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars: they would overwrite the run's own."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()
