"""The model card: what was exported, how to load it, the run that made it with its data and figures, and the license.

Numbers come from the run's own files as they are; where there is no run the card says so. Paths of this machine are
shortened to their last part, and `base_model` is given only where it is a hub id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PretrainedConfig

from tunesmith import __version__
from tunesmith.config import ExportSection
from tunesmith.hub import HUB_ID
from tunesmith.model.adapter_files import AdapterFiles
from tunesmith.model.checkpoint import DONE
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.pipeline.export_source import ExportSource, choose_name
from tunesmith.pipeline.load_config import load_values
from tunesmith.storage import CHECKPOINT, RunPaths, load_json, parse_checkpoint_step, save_text

Row = Sequence[object]
SETTINGS = (
    "algorithm.algorithm_type", "algorithm.group_size", "algorithm.batch_size", "algorithm.kl_coef",
    "num_epochs", "total_epochs", "total_steps", "max_tokens_per_batch", "trainer.learning_rate", "trainer.schedule",
    "trainer.weight_decay", "trainer.num_minibatches", "model.max_model_len", "model.temperature", "model.lora.r",
    "model.lora.alpha", "model.lora.target_modules", "model.lora.quantization", "seed",
)  # fmt: skip
"""Keys of a run's config that the card shows, where it has them."""
METRICS = ("rollout/reward_mean", "rollout/accuracy/mean", "rollout/sampled_tokens_mean", "train/loss", "train/entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the cards of all formats are made from."""

    settings: ExportSection
    source: ExportSource
    config: PretrainedConfig
    dtype: torch.dtype
    figures: Mapping[str, Any]


def write_card(path: Path, card: Card, *, folder_format: str) -> None:
    """Write the README.md of one format's folder."""
    save_text(path, "\n".join([*list_front_matter(card, folder_format), *list_body(card, folder_format), ""]))


def list_front_matter(card: Card, folder_format: str) -> Iterator[str]:
    """What the hub reads."""
    front: dict[str, Any] = {
        "license": card.settings.license,
        "library_name": {"hf": "transformers", "adapter": "peft", "gguf": "gguf"}[folder_format],
        "pipeline_tag": "text-generation",
        "tags": ["tunesmith", card.config.model_type],
    }
    base = find_base(card)
    if base is not None and is_hub_id(base):
        front["base_model"] = base
    yield "---"
    yield yaml.safe_dump(front, sort_keys=False).strip()
    yield "---"


def list_body(card: Card, folder_format: str) -> Iterator[str]:
    """The text."""
    base = find_base(card)
    yield f"# {card.figures['name']}"
    yield ""
    origin = "" if base is None else f", from {shorten(base)}"
    yield (
        f"A {card.config.model_type} model of {card.figures['num_parameters']:,} parameters{origin}, "
        f"exported by Tunesmith {__version__}."
    )
    yield from list_usage(card, folder_format)
    if card.source.run is not None:
        yield from list_training(card.source, card.source.run)
    else:
        yield from ("", "## Training", "", "Exported from a model folder: nothing is known of how it was trained.")
    yield from list_checks(card, folder_format)
    yield from ("", "## License", "")
    if card.settings.license == "unknown":
        yield "Not given. The terms of the base model and of the data apply."
    else:
        yield f"{card.settings.license}, as stated by who exported it. The terms of the base model and the data apply."


def list_usage(card: Card, folder_format: str) -> Iterator[str]:
    """How to load what is in the folder."""
    yield from ("", "## Use", "")
    if folder_format == "gguf":
        yield from ("```", f"llama-cli -m {next(iter(card.figures['gguf'].values()))} -cnv", "```", "")
        yield from list_table(("file", "type"), [(file, kind) for kind, file in card.figures["gguf"].items()])
        return
    yield "```python"
    if folder_format == "adapter":
        yield from (
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            "",
            'model = AutoPeftModelForCausalLM.from_pretrained(".")  # reads the base that adapter_config.json names',
        )
    else:
        yield from (
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")',
        )
    yield from (
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'messages = [{"role": "user", "content": "Hello!"}]',
        'options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}',
        "inputs = tokenizer.apply_chat_template(messages, **options)",
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=200)[0]))",
        "```",
    )
    if folder_format == "hf":
        merged = "" if card.source.adapter is None else " The adapter is merged into them."
        yield from ("", f"Weights are {str(card.dtype).removeprefix('torch.')}.{merged}")


def list_training(source: ExportSource, run: RunPaths) -> Iterator[str]:
    """The run's data, settings and figures up to the exported step."""
    values = load_values(run.config)
    step = find_step(Path(source.path))
    yield from ("", "## Training", "")
    yield f"By {describe_method(values)}." + ("" if step is None else f" These are the weights after step {step}.")
    rows = [("data", describe_data(values, "train_dataset")), ("held-out data", describe_data(values, "eval_dataset"))]
    of_adapter = describe_adapter(source.adapter)
    rows += [(key, of_adapter.get(key, read_key(values, key))) for key in SETTINGS]
    yield from ("", *list_table(("setting", "value"), [row for row in rows if row[1] is not None]))
    records = [record for record in load_metrics(run.metrics) if step is None or record["step"] <= step]
    yield from list_progress([record for record in records if record["kind"] == "train"])
    yield from list_losses([record for record in records if record["kind"] == "eval" and "eval/loss" in record])
    yield from list_evaluations(run, step)


def describe_adapter(adapter: AdapterFiles | None) -> dict[str, str]:
    """Keys that a loaded adapter has of its own, whatever the run's config says; none without an adapter."""
    if adapter is None:
        return {}
    targets = adapter.target_modules
    names = targets if isinstance(targets, str) else ", ".join(sorted(targets))
    return {
        "model.lora.r": str(adapter.r),
        "model.lora.alpha": str(float(adapter.alpha)),
        "model.lora.target_modules": names,
    }


def describe_method(values: Mapping[str, Any]) -> str:
    method = read_key(values, "algorithm.algorithm_type")
    if method is None:
        return "supervised fine-tuning"
    has_rollouts = read_key(values, "algorithm.group_size") is not None
    return f"{'reinforcement learning' if has_rollouts else 'learning from preferences'} ({method})"


def list_progress(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The first and the last step's metrics."""
    if not records:
        return
    first, last = records[0], records[-1]
    names = [name for name in METRICS if name in first and name in last]
    yield from ("", *list_table(("metric", f"step {first['step']}", f"step {last['step']}"),
                           [(name, number(first[name]), number(last[name])) for name in names]))  # fmt: skip


def list_losses(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Losses on held-out rows."""
    if records:
        rows = [(record["step"], number(record["eval/loss"])) for record in records]
        yield from ("", *list_table(("step", "loss on held-out rows, nats a token"), rows))


def list_evaluations(run: RunPaths, step: int | None) -> Iterator[str]:
    """Scores on held-out tasks with their intervals."""
    rows: list[Row] = []
    for path in sorted(run.evaluation(0).parent.glob("step_*.json")):
        at = int(path.stem.removeprefix("step_"))
        if step is not None and at > step:
            continue
        for name, result in load_json(path).items():
            if result["mean"] is not None:
                low, high = result["interval_95"]
                rows.append(
                    (at, name, len(result["tasks"]), number(result["mean"]), f"{number(low)} to {number(high)}")
                )
    if rows:
        yield from ("", "## Evaluation", "", "The mean reward of held-out tasks, with the agent the run trained.", "")
        yield from list_table(("step", "tasks", "number", "mean", "95 % interval"), rows)


def list_checks(card: Card, folder_format: str) -> Iterator[str]:
    """How what is in the folder was compared with the source."""
    checks = {name: figures for name, figures in card.figures["checks"].items() if name.startswith(folder_format)}
    if not checks:
        return
    yield from ("", "## Compared with the source", "")
    if folder_format == "hf":
        yield f"Loaded back, the weights give the same logits bit for bit on {checks['hf']['num_tokens']:.0f} tokens."
        return
    yield (
        "Read by llama.cpp: the tokenizer gives the same ids, and next-token distributions differ from those of the "
        "source in float32 by (KL divergence in nats a token):"
    )
    rows = [
        (
            name.removeprefix("gguf/"),
            number(found["kl_mean"]),
            number(found["kl_max"]),
            f"{found['same_top_token']:.1%}",
        )
        for name, found in checks.items()
    ]
    yield from ("", *list_table(("file", "mean", "largest", "same likeliest token"), rows))


def find_base(card: Card) -> str | None:
    """The model that training started from, where it is known."""
    if card.source.adapter is not None:
        return card.source.adapter.base
    if card.source.run is not None:
        path = read_key(load_values(card.source.run.config), "model.path")
        return None if path is None else str(path)
    return card.source.path if is_hub_id(card.source.path) else None


def find_step(model: Path) -> int | None:
    """The step whose weights these are."""
    if CHECKPOINT.fullmatch(model.name):
        return parse_checkpoint_step(model)
    step = load_json(model / DONE).get("step") if (model / DONE).is_file() else None
    return step if isinstance(step, int) else None


def describe_data(values: Mapping[str, Any], key: str) -> str | None:
    """The data sets under a key and its plural, by their last part and split."""
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
    """The value of a dotted key, None where a part of it is missing."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def is_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and "/" in path and not Path(path).exists()


def shorten(path: str) -> str:
    return path if is_hub_id(path) else choose_name(Path(path), None)


def list_table(head: Row, rows: Sequence[Row]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(str(cell) for cell in head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
