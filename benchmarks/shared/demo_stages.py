"""Stages of `tunesmith demo` on other data, for benchmarks that train its models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.commands.demo.run import PIPELINE, save_base
from tunesmith.commands.run.config import load_pipeline, plan_stages
from tunesmith.commands.sft.train import run_offline
from tunesmith.tasks.load import write_rows


def resolve_stage(name: str, root: Path, sizes: Sequence[str]) -> Any:
    """The settings of a stage whose inputs are in `root`; `sizes` are variables of the demo, as in `num_steps=2`."""
    changes = [f"folder={json.dumps(str(root))}", *(f"variables.{size}" for size in sizes)]
    (stage,) = [each for each in plan_stages(load_pipeline(PIPELINE, changes)) if each.name == name]
    return stage.resolve(lambda reference: str(root / reference.stage / (reference.file or "model")))


def finetune(root: Path, rows: Iterable[Mapping[str, Any]], *, seed: int) -> Path:
    """Write the base model and fine-tune it on the rows; return the model's folder."""
    save_base(root / "base", seed=seed)
    write_rows(root / "demonstrations" / "rows.jsonl", rows)
    return run_offline(resolve_stage("sft", root, [f"seed={seed}"]), out_dir=root / "sft").folder
