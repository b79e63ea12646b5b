"""`tunesmith doctor --plan`: whether a run fits a card, from its run file and the model's configuration alone.

The memory of the run as it is configured stands beside that of the same run with gradient checkpointing, with an
adapter, and with an adapter on 4-bit weights. If the run does not fit, the first change that makes it fit is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.commands.settings import load_settings
from tunesmith.commands.stage import format_count
from tunesmith.commands.table import find_command
from tunesmith.config import RunConfig
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.load import check_lengths, resolve_device, resolve_dtype
from tunesmith.model.memory import GIB, MIN_ROW_TOKENS, Card, count_token_bytes, estimate_memory, fit_rows
from tunesmith.runs.load_config import change_section
from tunesmith.runs.memory import build_planned_model, collect_run_settings, find_card

CHECKPOINTING, ROW = "trainer.has_gradient_checkpointing=true", "trainer.max_tokens_per_row="
ADAPTER, NF4 = "model.lora={}", "model.lora.quantization=nf4"
NO_CHANGE = "nothing fits one card: several GPUs (docs/scaling.md), or a smaller model"


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
    """By the heading of their column; the run as it is comes first."""
    change: PlannedRun | None
    """The smallest change with which it fits; None if none is needed, or none helps."""

    @property
    def is_fitting(self) -> bool:
        return next(iter(self.runs.values())).num_bytes <= self.card.num_bytes

    def to_json(self) -> dict[str, Any]:
        runs = {
            name: {"changes": run.changes, "gib": {part: each / GIB for part, each in run.parts.items()}}
            for name, run in self.runs.items()
        }
        return {
            "model": self.model,
            "num_parameters": self.num_parameters,
            "card_gib": self.card.num_bytes / GIB,
            "fits": self.is_fitting,
            "runs": runs,
            "change": None if self.change is None else self.change.changes,
        }

    def __str__(self) -> str:
        size = f"{self.card.num_bytes / GIB:.4g} GiB"
        table: dict[str, list[str]] = {
            part: [f"{run.parts.get(part, 0) / GIB:.1f}" for run in self.runs.values()]
            for part in dict.fromkeys(part for run in self.runs.values() for part in run.parts)
        }
        runs = self.runs.values()
        table["sum, GiB"] = [f"{run.num_bytes / GIB:.1f}" for run in runs]
        table["fits"] = ["yes" if run.num_bytes <= self.card.num_bytes else "no" for run in runs]
        table["row tokens"] = [f"{run.row_tokens:,}" for run in runs]
        table["cached tokens"] = [f"{run.num_cached_tokens:,}" for run in runs]
        own = next(iter(runs))
        lines = [
            f"{self.model}, {format_count(self.num_parameters)} parameters, on {size}",
            "",
            f"{'GiB':14}" + "".join(f"{name:>16}" for name in self.runs),
            *(f"{name:14}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in table.items()),
            "",
        ]
        if self.is_fitting:
            lines.append(f"fits, with {(self.card.num_bytes - own.num_bytes) / GIB:.1f} GiB to spare")
        elif self.change is None:
            lines.append(f"does not fit; {NO_CHANGE}")
        else:
            listed = " ".join(f"--set {each}" for each in self.change.changes)
            lines.append(f"does not fit; it does with {self.change.num_bytes / GIB:.1f} GiB and {listed}")
        return "\n".join(lines)


def plan_memory(
    plan: str | Path | RunConfig, *, memory_gib: float | None = None, overrides: Sequence[str] = ()
) -> MemoryPlan:
    """The memory of the run of a run file, or of a model with the defaults of a run file, on a card of `memory_gib`
    GiB or on the device of this machine."""
    if isinstance(plan, RunConfig) or Path(plan).suffix in (".yaml", ".yml"):
        config = load_settings(find_command("tune"), plan, overrides)
    else:
        config = load_settings(find_command("tune"), None, [f"model.path={plan}", *overrides])
    if memory_gib is None:
        card = find_card(resolve_device(config.model.device))
    else:
        card = Card(type="cuda", num_bytes=int(memory_gib * GIB))
    lora = config.model.lora
    columns = {"as it is": ()} | ({} if config.trainer.has_row_graphs else {"checkpointing": (CHECKPOINTING,)})
    if lora is None:
        columns |= {"LoRA": (ADAPTER,)}
    if card.type == "cuda" and (lora is None or lora.quantization == "none"):
        columns |= {"LoRA, 4 bits": (ADAPTER, NF4) if lora is None else (NF4,)}
    if lora is not None:
        columns |= {"all weights": ("model.lora=null",)}
    runs = {name: plan_run(config, changes, card) for name, changes in columns.items()}
    own = runs["as it is"]
    change = None
    if own.num_bytes > card.num_bytes:
        tried = (plan_run(config, changes, card) for changes in list_changes(config, card))
        change = next((each for each in tried if each.num_bytes <= card.num_bytes), None)
    model = build_planned_model(config.model, config.model.path, torch.bfloat16)
    check_lengths(model.config, config.model.max_model_len)
    return MemoryPlan(
        model=config.model.path, num_parameters=model.num_parameters(), card=card, runs=runs, change=change
    )


def list_changes(config: RunConfig, card: Card) -> Iterator[tuple[str, ...]]:
    """Overrides that save memory, the mildest first: those that do not change what is trained come before others."""
    rows = (f"{ROW}{max(MIN_ROW_TOKENS, config.model.max_model_len)}",)
    adapters: list[tuple[str, ...]] = [()] if config.model.lora is not None else [(), (ADAPTER,)]
    if card.type == "cuda" and (config.model.lora is None or config.model.lora.quantization == "none"):
        adapters.append((*adapters[-1], NF4))
    for adapter in adapters:
        yield adapter
        yield (*adapter, *rows)
        if not config.trainer.has_row_graphs:  # excludes checkpointing
            yield (*adapter, CHECKPOINTING)
            yield (*adapter, CHECKPOINTING, *rows)


def plan_run(config: RunConfig, changes: Sequence[str], card: Card) -> PlannedRun:
    """The memory of the run with these changes."""
    config = change_section(config, changes)
    dtype = resolve_dtype(config.model.dtype, torch.device(card.type))
    model = build_planned_model(config.model, config.model.path, dtype)
    if config.model.lora is not None:
        model.requires_grad_(False)
        add_adapter(model, config.model.lora, base=config.model.path, dtype=dtype)
    settings = fit_rows(model, collect_run_settings(config, resolve_algorithm(config.algorithm), model), card)
    parts = estimate_memory(model, settings, card)
    token_bytes = count_token_bytes(model.config) * dtype.itemsize
    num_cached_tokens = parts.get("KV cache", 0) // token_bytes
    return PlannedRun(
        changes=tuple(changes), parts=parts, row_tokens=settings.row_tokens, num_cached_tokens=num_cached_tokens
    )
