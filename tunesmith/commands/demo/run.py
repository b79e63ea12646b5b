"""`tunesmith demo`: runs the pipeline of `demo.yaml` in a folder of its own, and prints the accuracies."""

from __future__ import annotations

import importlib.util
import json
import time
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tunesmith.arguments import suggest_name
from tunesmith.commands.eval.comparison import Estimate, format_estimate
from tunesmith.commands.run.config import StageSelection, load_pipeline
from tunesmith.commands.run.run import run_pipeline
from tunesmith.commands.settings import OVERRIDES_VARIABLE, read_variable
from tunesmith.errors import ConfigError, errors_of
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.monitor.console import ConsoleProgress
from tunesmith.runs.record import COMPARISON
from tunesmith.storage import load_json, save_json

PIPELINE = Path(__file__).with_name("demo.yaml")
RESULT = "result.json"
MODES = {"sampled": 1, "greedy": 0}
"""Stage of an evaluation -> its temperature; the figures are those of the first, which is the one of training."""


def save_base(out_dir: Path, *, seed: int) -> None:
    """Write the untrained model."""
    tokenizer = build_pocket_tokenizer()
    save_model_files(out_dir, build_pocket_model(tokenizer, seed=seed), tokenizer)


def run_command(*, seed: int, out: str) -> str:
    """Run the demo in a new folder below `out`, or finish the newest one of this seed that was interrupted; return
    accuracies on held-out problems and the elapsed seconds of this call as JSON."""
    started = time.monotonic()
    if importlib.util.find_spec("agentscope") is None:
        raise ConfigError("the demo's agent needs AgentScope: pip install 'tunesmith[agentscope]'")
    torch.set_num_threads(1)
    parent = Path(out).expanduser().absolute()
    unfinished = [each for each in sorted(parent.glob(f"*-seed{seed}")) if not (each / RESULT).exists()]
    root = unfinished[-1] if unfinished else parent / f"{datetime.now():%Y%m%d%H%M%S}-seed{seed}"
    known, changes = load_pipeline(PIPELINE).variables, [f"folder={json.dumps(str(root))}", f"variables.seed={seed}"]
    for size in read_variable():
        if (name := size.partition("=")[0]) not in known:
            raise ConfigError(f"{OVERRIDES_VARIABLE}: unknown size {name!r}: {suggest_name(name, list(known))}")
        changes.append(f"variables.{size}")
    with errors_of(OVERRIDES_VARIABLE):
        config = load_pipeline(PIPELINE, changes)
    ConsoleProgress().show_line(f"writing to {root}")
    trained = run_pipeline(config, selection=StageSelection()).stages["rl"].folder
    results = {mode: load_json(root / mode / COMPARISON)["test"]["models"] for mode in MODES}
    rewards = {
        name: {mode: Estimate(**results[mode][name]["estimates"]["reward"]) for mode in MODES}
        for name in results["sampled"]
    }
    table = Table(title="accuracy on held-out problems")
    table.add_column("model")
    for mode, temperature in MODES.items():
        table.add_column(f"{mode} (temperature {temperature})", justify="right")
    for name, row in rewards.items():
        table.add_row(name, *(format_estimate(each, is_share=True) for each in row.values()))
    Console().print(table)
    print(f"run folder: {trained}")
    accuracies = {name: round(row["sampled"].mean, 4) for name, row in rewards.items()}
    result = accuracies | {"seconds": round(time.monotonic() - started, 1)}
    save_json(root / RESULT, result)
    return json.dumps(result)
