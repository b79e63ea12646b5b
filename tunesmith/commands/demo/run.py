"""The demo: trains the pocket model to solve word problems in AgentScope's ReActAgent with a calculator.

A pocket model is initialized from a seed, fine-tuned on demonstrations of the agent's message format, and then trained
by reinforcement learning. Base, fine-tuned and trained model are compared on held-out problems, sampled as in training
and greedily.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import datasets
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from tunesmith.commands.eval.compare import run_eval
from tunesmith.commands.eval.comparison import Estimate, format_estimate
from tunesmith.commands.eval.sample_scores import REWARD
from tunesmith.commands.settings import OVERRIDES_VARIABLE, read_variable
from tunesmith.commands.sft.train import run_offline
from tunesmith.commands.tune.tune import run_tuning
from tunesmith.compat.chat_models import build_agentscope_model
from tunesmith.config import (
    AlgorithmSection,
    ConversationDataSection,
    DatasetSection,
    EvaluationSection,
    ModelSection,
    MonitorSection,
    RunConfig,
    SftConfig,
    SftTrainerSection,
    TrainerSection,
)
from tunesmith.errors import ConfigError
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.runs.policy import BuildModel
from tunesmith.storage import save_json, storage_errors
from tunesmith.tasks.arithmetic import build_problems, save_problems
from tunesmith.tasks.load import write_rows

AGENT_MODULE = "tunesmith.commands.demo.agent"
TEST_SET = "test"
DEMONSTRATIONS, RESULT = "demonstrations.jsonl", "result.json"
FINETUNE_SAVE_INTERVAL = 1000
"""Larger than the number of fine-tuning steps: it takes a minute and is saved if it is interrupted."""
MODES: Mapping[str, float] = {"sampled": 1.0, "greedy": 0.0}
"""Evaluation mode -> temperature."""
REPORTED = "sampled"
"""The mode whose accuracies `run_demo` returns; the one used in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes and hyperparameters of the demo."""

    num_demonstrations: int = 2500
    num_epochs: int = 5
    finetune_tokens_per_batch: int = 1024
    finetune_learning_rate: float = 3e-3
    num_train_tasks: int = 4000
    num_test_tasks: int = 200
    num_steps: int = 40
    batch_size: int = 32
    group_size: int = 8
    num_minibatches: int = 4
    learning_rate: float = 3e-4


DEFAULTS = DemoSettings()
Demonstrate = Callable[..., list[dict[str, Any]]]
"""Writes a row for each problem; also takes the seed."""


def run_demo(*, seed: int, out: Path, build_model: BuildModel, settings: DemoSettings = DEFAULTS) -> dict[str, float]:
    """Run the demo in a new folder below `out`, or finish the newest one of this seed that was interrupted; return
    accuracies on held-out problems and the elapsed seconds of this call."""
    started = time.monotonic()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    agent = load_agent()
    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    parent = out.expanduser().absolute()
    unfinished = [each for each in sorted(parent.glob(f"*-seed{seed}")) if not (each / RESULT).exists()]
    root = unfinished[-1] if unfinished else parent / f"{datetime.now():%Y%m%d%H%M%S}-seed{seed}"
    screen.print(f"1/4  writing a pocket model and {settings.num_train_tasks} word problems to {root}")
    base = save_base(root, seed=seed, settings=settings)
    screen.print(f"2/4  fine-tuning on {settings.num_demonstrations} demonstrations")
    finetuned = finetune(base, agent.build_demonstrations, root, seed=seed, settings=settings)
    screen.print(f"3/4  reinforcement learning in AgentScope's ReActAgent, {settings.num_steps} steps")
    config = build_config(finetuned, root, seed=seed, settings=settings)
    trained = run_tuning(config, workflow=agent.solve_problem, judge=agent.judge_answer, build_model=build_model)
    assert trained.checkpoint is not None, "the last step is always saved"
    screen.print(f"4/4  evaluating three models on {settings.num_test_tasks} held-out problems")
    models = {"base": base, "sft": finetuned, "rl": trained.checkpoint}
    results = evaluate(models, config, agent, build_model=build_model)
    print_table(results)
    print(f"run folder: {trained.folder}")
    accuracies = {name: round(row[REPORTED].mean, 4) for name, row in results.items()}
    result = accuracies | {"seconds": round(time.monotonic() - started, 1)}
    save_json(root / RESULT, result)
    return result


def load_agent() -> ModuleType:
    """The agent's module, which requires AgentScope."""
    if importlib.util.find_spec("agentscope") is None:
        raise ConfigError("the demo's agent needs AgentScope: pip install 'tunesmith[agentscope]'")
    return importlib.import_module(AGENT_MODULE)


def save_base(root: Path, *, seed: int, settings: DemoSettings) -> Path:
    """Write the untrained model and the problems, which are the same each time."""
    folder = root / "base"
    with storage_errors(root, "write"):
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = build_pocket_tokenizer()
        save_model_files(folder, build_pocket_model(tokenizer, seed=seed), tokenizer)
        save_problems(root / "data", num_train=settings.num_train_tasks, num_test=settings.num_test_tasks, seed=seed)
    return folder


def finetune(base: Path, demonstrate: Demonstrate, root: Path, *, seed: int, settings: DemoSettings) -> Path:
    """Fine-tune the base model on demonstrations; return the model's folder."""
    problems = build_problems("train", num_problems=settings.num_demonstrations, seed=seed)
    write_rows(root / DEMONSTRATIONS, demonstrate(problems, seed=seed))
    config = SftConfig(
        model=build_model_section(base),
        train_dataset=ConversationDataSection(path=str(root / DEMONSTRATIONS)),
        num_epochs=settings.num_epochs,
        max_tokens_per_batch=settings.finetune_tokens_per_batch,
        seed=seed,
        save_interval_steps=FINETUNE_SAVE_INTERVAL,
        trainer=SftTrainerSection(
            learning_rate=settings.finetune_learning_rate,
            warmup_steps=20,
            min_lr_ratio=0.1,
            weight_decay=0.01,
            betas=(0.9, 0.95),
        ),
        monitor=MonitorSection(log_interval_steps=50),
    )
    return run_offline(config, out_dir=root / "sft").folder


def build_config(finetuned: Path, root: Path, *, seed: int, settings: DemoSettings) -> RunConfig:
    """Run configuration of the reinforcement learning."""
    data = str(root / "data")
    return RunConfig(
        checkpoint_root_dir=str(root),
        project="pocket",
        name="rl",
        continue_from_checkpoint=True,
        seed=seed,
        total_steps=settings.num_steps,
        save_interval_steps=settings.num_steps,
        model=build_model_section(finetuned, max_tokens=48),
        train_dataset=DatasetSection(path=data, required_fields=("question", "answer")),
        eval_datasets={TEST_SET: DatasetSection(path=data, split="test")},
        algorithm=AlgorithmSection(batch_size=settings.batch_size, group_size=settings.group_size),
        trainer=TrainerSection(
            learning_rate=settings.learning_rate,
            schedule="cosine",
            min_lr_ratio=0.1,
            betas=(0.9, 0.95),
            num_minibatches=settings.num_minibatches,
        ),
        evaluation=EvaluationSection(interval_steps=0),
        monitor=MonitorSection(log_interval_steps=5),
    )


def build_model_section(path: Path, **sampling: Any) -> ModelSection:
    return ModelSection(path=str(path), device="cpu", dtype="float32", max_model_len=512, **sampling)


def evaluate(
    models: Mapping[str, Path], config: RunConfig, agent: ModuleType, *, build_model: BuildModel
) -> dict[str, dict[str, Estimate]]:
    """Accuracy of each model in each mode."""
    comparisons = {
        mode: run_eval(
            config.model_copy(update={"evaluation": EvaluationSection(temperature=temperature)}),
            models={name: str(path) for name, path in models.items()},
            workflow=agent.solve_problem,
            judge=agent.judge_answer,
            build_model=build_model,
        ).sets[TEST_SET]
        for mode, temperature in MODES.items()
    }
    return {name: {mode: comparisons[mode].results[name].estimates[REWARD] for mode in MODES} for name in models}


def print_table(results: Mapping[str, Mapping[str, Estimate]]) -> None:
    """Print accuracies with 95 % intervals, by model and mode."""
    table = Table(title="accuracy on held-out problems")
    table.add_column("model")
    for mode, temperature in MODES.items():
        table.add_column(f"{mode} (temperature {temperature:g})", justify="right")
    for name, row in results.items():
        table.add_row(name, *(format_estimate(row[mode], is_share=True) for mode in MODES))
    Console().print(table)


def run_command(*, seed: int, out: str) -> str:
    """`tunesmith demo`: the figures as JSON."""
    try:
        sizes = OmegaConf.merge(OmegaConf.structured(DEFAULTS), OmegaConf.from_dotlist(read_variable()))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{OVERRIDES_VARIABLE}: {error}") from None
    settings = cast(DemoSettings, OmegaConf.to_object(sizes))
    return json.dumps(run_demo(seed=seed, out=Path(out), build_model=build_agentscope_model, settings=settings))
