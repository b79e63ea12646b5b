"""`tunesmith doctor --plan`: whether a run fits a card, from its run file and the model's configuration alone.

The memory of the run as it is configured stands beside that of the same run with changes that save memory, the mildest
first; the first one that fits is named.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import load_algorithm
from tunesmith.commands.settings import load_settings
from tunesmith.commands.stage import format_count
from tunesmith.commands.table import find_command
from tunesmith.config import ModelSection, RunConfig
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.load import check_lengths, resolve_device, resolve_dtype
from tunesmith.model.memory import GIB, Card, count_token_bytes, estimate_memory, fit_rows
from tunesmith.runs.load_config import change_section
from tunesmith.runs.load_function import CustomComponents
from tunesmith.runs.memory import build_planned_model, collect_run_settings, find_card

CHECKPOINTING = ("trainer.has_gradient_checkpointing=true",)
ADAPTER, NF4 = "model.lora={}", "model.lora.quantization=nf4"
AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The memory of one configuration."""

    changes: tuple[str, ...]
    """Overrides of the run file; none for the run as it is."""
    parts: Mapping[str, int]
    """Bytes by part."""
    row_tokens: int
    """Tokens of a forward and backward (`trainer.max_tokens_per_row`)."""
    num_cached_tokens: int
    """Tokens of all rollouts together that the KV cache holds."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a run takes, and what to change if that is too much."""

    model: str
    num_parameters: int
    card: Card
    runs: Mapping[str, PlannedRun]
    """By the heading of their column, the mildest change first."""

    def list_fitting(self) -> list[str]:
        """The headings of the runs that fit the card."""
        return [name for name, run in self.runs.items() if run.num_bytes <= self.card.num_bytes]

    def to_json(self) -> dict[str, Any]:
        runs = {
            name: {"changes": run.changes, "gib": {part: each / GIB for part, each in run.parts.items()}}
            for name, run in self.runs.items()
        }
        size = self.card.num_bytes / GIB
        return {"model": self.model, "card_gib": size, "fitting": self.list_fitting(), "runs": runs}

    def __str__(self) -> str:
        runs, fitting = self.runs.values(), self.list_fitting()
        parts = dict.fromkeys(part for run in runs for part in run.parts)
        table = {part: [f"{run.parts.get(part, 0) / GIB:.1f}" for run in runs] for part in parts}
        table["sum"] = [f"{run.num_bytes / GIB:.1f}" for run in runs]
        table["fits"] = ["yes" if name in fitting else "no" for name in self.runs]
        table["row tokens"] = [f"{run.row_tokens:,}" for run in runs]
        table["cached tokens"] = [f"{run.num_cached_tokens:,}" for run in runs]
        width = max(14, *(len(name) + 1 for name in table))
        advice = "does not fit: several GPUs (docs/scaling.md), or a smaller model"
        if fitting:
            changes = " ".join(f"--set {each}" for each in self.runs[fitting[0]].changes)
            advice = f"fits with {changes}" if changes else "fits as it is"
        return "\n".join(
            [
                f"{self.model}, {format_count(self.num_parameters)} parameters, on {self.card.num_bytes / GIB:.4g} GiB",
                "",
                *(f"{name:{width}}" + "".join(f"{cell:>13}" for cell in cells)
                  for name, cells in {"GiB": list(self.runs), **table}.items()),
                "",
                advice,
            ]
        )  # fmt: skip


def plan_memory(
    plan: str | Path | RunConfig, *, memory_gib: float | None = None, overrides: Sequence[str] = ()
) -> MemoryPlan:
    """The memory of the run of a run file, or of a model with the defaults of a run file, on a card of `memory_gib`
    GiB or on the device of this machine."""
    if not isinstance(plan, RunConfig) and Path(plan).suffix not in (".yaml", ".yml"):
        plan = RunConfig.model_validate({"model": {"path": str(plan)}})
    config = load_settings(find_command("tune"), plan, overrides)
    card = find_card(resolve_device(config.model.device))
    if memory_gib is not None:
        card = Card(type="cuda", num_bytes=int(memory_gib * GIB))
    adapter = () if config.model.lora is not None else (ADAPTER,)
    columns = {AS_IT_IS: (), "checkpoints": CHECKPOINTING}
    if adapter:
        columns |= {"LoRA": adapter, "LoRA, ckpt": (*adapter, *CHECKPOINTING)}
    if card.type == "cuda":
        columns |= {"4 bits, ckpt": (*adapter, NF4, *CHECKPOINTING)}
    runs = {name: plan_run(config, changes, card) for name, changes in columns.items()}
    model = build_planned_model(config.model, torch.bfloat16)
    check_lengths(model.config, config.model.max_model_len)
    return MemoryPlan(model=config.model.path, num_parameters=model.num_parameters(), card=card, runs=runs)


def plan_run(config: RunConfig, changes: Sequence[str], card: Card) -> PlannedRun:
    """The memory of the run with these changes."""
    config = change_section(config, changes)
    dtype = resolve_dtype(config.model.dtype, torch.device(card.type))
    model = build_trained_model(config.model.model_dump_json(), dtype)
    algorithm = load_algorithm(config.algorithm, CustomComponents().load)
    settings = fit_rows(model, collect_run_settings(config, algorithm, model), card)
    parts = estimate_memory(model, settings, card)
    token_bytes = count_token_bytes(model.config) * dtype.itemsize
    num_cached_tokens = parts.get("KV cache", 0) // token_bytes
    return PlannedRun(
        changes=tuple(changes), parts=parts, row_tokens=settings.row_tokens, num_cached_tokens=num_cached_tokens
    )


@functools.lru_cache(maxsize=4)
def build_trained_model(section_json: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a section without its weights, with its adapter; columns and cards share it."""
    section = ModelSection.model_validate_json(section_json)
    model = build_planned_model(section, dtype)
    if section.lora is not None:
        model.requires_grad_(False)
        add_adapter(model, section.lora, base=section.path, dtype=dtype)
    return model
