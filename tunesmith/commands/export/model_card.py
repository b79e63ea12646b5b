"""The model card: README.md with usage, training run, evaluation, comparison with the source, and license.

Numbers are copied from the files of the run; without a run the card states that the training is unknown. Local paths
are shortened to their last component, and `base_model` is set only if it is a hub id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jinja2 import Environment, StrictUndefined
from transformers import PretrainedConfig

from tunesmith.config import ExportSection
from tunesmith.hub import HUB_ID
from tunesmith.model.source.resolve import AdapterFiles
from tunesmith.monitor.metrics_file import KINDS
from tunesmith.runs.record import RunRecord
from tunesmith.runs.trained_model import ExportSource, choose_name
from tunesmith.storage import CHECKPOINT, DONE, load_json, parse_checkpoint_step, save_text
from tunesmith.version import __version__

Row = Sequence[object]
FolderFormat = Literal["hf", "adapter", "gguf"]
SETTINGS = (
    "algorithm.algorithm_type", "algorithm.group_size", "algorithm.batch_size", "algorithm.kl_coef",
    "num_epochs", "total_epochs", "total_steps", "max_tokens_per_batch", "trainer.learning_rate", "trainer.schedule",
    "trainer.weight_decay", "trainer.num_minibatches", "model.max_model_len", "model.temperature", "model.lora.r",
    "model.lora.alpha", "model.lora.target_modules", "model.lora.quantization", "seed",
)  # fmt: skip
"""Config keys that the card lists, if the run has them."""
METRICS = ("rollout/reward_mean", "rollout/accuracy/mean", "rollout/sampled_tokens_mean", "train/loss", "train/entropy")
"""Metrics that the card lists for the first and the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Inputs of the cards of all formats."""

    settings: ExportSection
    source: ExportSource
    config: PretrainedConfig
    dtype: torch.dtype
    figures: Mapping[str, Any]


def write_card(path: Path, card: Card, *, folder_format: FolderFormat) -> None:
    """Write README.md for the folder of one format."""
    base = find_base(card)
    checks = {name: figures for name, figures in card.figures["checks"].items() if name.startswith(folder_format)}
    source = files(__package__).joinpath("model_card.md.jinja").read_text(encoding="utf-8")
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(source)
    text = template.render(
        front_matter=yaml.safe_dump(build_front_matter(card, folder_format), sort_keys=False).strip(),
        format=folder_format,
        version=__version__,
        name=card.figures["name"],
        model_type=card.config.model_type,
        num_parameters=card.figures["num_parameters"],
        base=None if base is None else shorten(base),
        dtype=str(card.dtype).removeprefix("torch."),
        is_merged=card.source.adapter is not None,
        gguf_files=[(file, kind) for kind, file in card.figures.get("gguf", {}).items()],
        training=None if card.source.run is None else describe_training(card.source, card.source.run),
        num_checked_tokens=f"{checks['hf']['num_tokens']:.0f}" if "hf" in checks else None,
        checks=[
            (
                name.removeprefix("gguf/"),
                format_number(found.get("kl_mean")),
                format_number(found.get("kl_max")),
                f"{found.get('same_top_token', 1.0):.1%}",
            )
            for name, found in checks.items()
        ],
        license=card.settings.license,
    )
    save_text(path, text)


def build_front_matter(card: Card, folder_format: FolderFormat) -> dict[str, Any]:
    """YAML metadata that the Hugging Face hub reads."""
    front: dict[str, Any] = {
        "license": card.settings.license,
        "library_name": {"hf": "transformers", "adapter": "peft", "gguf": "gguf"}[folder_format],
        "pipeline_tag": "text-generation",
        "tags": ["tunesmith", card.config.model_type],
    }
    base = find_base(card)
    if base is not None and is_hub_id(base):
        front["base_model"] = base
    return front


def describe_training(source: ExportSource, run: RunRecord) -> dict[str, Any]:
    """Method, data, settings, metrics and evaluations of the run up to the exported step, for the template."""
    values, step = run.settings, find_step(Path(source.path))
    rows = [("data", describe_data(values, "train_dataset")), ("held-out data", describe_data(values, "eval_dataset"))]
    adapter_values = describe_adapter(source.adapter)
    rows += [(key, adapter_values.get(key, read_key(values, key))) for key in SETTINGS]
    train, evaluations = (
        [(at, row) for at, row in run.metrics.to_table(kind).rows.items() if step is None or at <= step]
        for kind in KINDS
    )
    (first_step, first), (last_step, last) = (train[0], train[-1]) if train else ((None, {}), (None, {}))
    shared = [name for name in METRICS if name in first and name in last]
    return {
        "method": describe_method(run),
        "step": step,
        "settings": [row for row in rows if row[1] is not None],
        "first_step": first_step,
        "last_step": last_step,
        "progress": [(name, format_number(first[name]), format_number(last[name])) for name in shared],
        "losses": [(at, format_number(row["eval/loss"])) for at, row in evaluations if "eval/loss" in row],
        "evaluations": list_evaluations(run, step),
    }


def list_evaluations(run: RunRecord, step: int | None) -> list[Row]:
    """Mean rewards on held-out tasks with their intervals, up to `step`."""
    rows: list[Row] = []
    for eval_step in run.list_evaluated_steps():
        if step is not None and eval_step > step:
            continue
        for name, result in run.load_evaluation(eval_step).items():
            if result["mean"] is not None:
                low, high = map(format_number, result["interval_95"])
                mean = format_number(result["mean"])
                rows.append((eval_step, name, len(result["tasks"]), mean, f"{low} to {high}"))
    return rows


def describe_adapter(adapter: AdapterFiles | None) -> dict[str, str]:
    """Config keys whose values come from the adapter itself, which take precedence over the run's config."""
    if adapter is None:
        return {}
    return {
        "model.lora.r": str(adapter.r),
        "model.lora.alpha": str(float(adapter.alpha)),
        "model.lora.target_modules": ", ".join(sorted(adapter.target_modules)),
    }


def describe_method(run: RunRecord) -> str:
    if run.kind == "sft":
        return "supervised fine-tuning"
    method = run.settings.get("algorithm_type") or read_key(run.settings, "algorithm.algorithm_type")
    return f"{'preference optimization' if run.is_offline else 'reinforcement learning'} ({method})"


def find_base(card: Card) -> str | None:
    """The base model of the adapter or of the run, if known."""
    if card.source.adapter is not None:
        return card.source.adapter.base
    if card.source.run is not None:
        path = read_key(card.source.run.settings, "model.path")
        return None if path is None else str(path)
    return card.source.path if is_hub_id(card.source.path) else None


def find_step(model: Path) -> int | None:
    """Training step of the exported weights, if known."""
    if CHECKPOINT.fullmatch(model.name):
        return parse_checkpoint_step(model)
    step = load_json(model / DONE).get("step") if (model / DONE).is_file() else None
    return step if isinstance(step, int) else None


def describe_data(values: Mapping[str, Any], key: str) -> str | None:
    """The data sets under a key and its plural, by last path component and split."""
    several = read_key(values, f"{key}s")
    found = [read_key(values, key), *(several.values() if isinstance(several, Mapping) else ())]
    described = []
    for dataset in found:
        if isinstance(dataset, Mapping) and dataset.get("path"):
            paths = [dataset["path"]] if isinstance(dataset["path"], str) else dataset["path"]
            split = f" ({dataset['split']})" if dataset.get("split") else ""
            described.append(", ".join(shorten(path) for path in paths) + split)
    return "; ".join(described) or None


def read_key(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if a component is missing."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def is_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and "/" in path and not Path(path).exists()


def shorten(path: str) -> str:
    return path if is_hub_id(path) else choose_name(Path(path), None)


def format_number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
