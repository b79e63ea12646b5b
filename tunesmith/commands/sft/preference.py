"""Preference training (DPO, KTO, ORPO, SimPO): like supervised fine-tuning, with a loss over whole completions.

DPO and KTO compare the model with its frozen copy, the reference; ORPO and SimPO load none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.commands.sft.plan import OfflinePlan, build_plan
from tunesmith.commands.sft.preference_pairs import PreferenceReader, add_probes
from tunesmith.commands.sft.train import OfflineResult, build_trainer, run_offline
from tunesmith.config import AlgorithmSection, PreferenceConfig
from tunesmith.runs.extra_models import load_reference
from tunesmith.trainer.trainer import Trainer


def run_preference(config: PreferenceConfig, *, out_dir: Path) -> OfflineResult:
    """Train into `out_dir`, resuming an interrupted run with the same settings; raises if training fails."""
    algorithm = AlgorithmSection(algorithm_type=config.algorithm_type, terms_args=config.terms_args)
    has_reference = "reference" in resolve_algorithm(algorithm).needs

    def build_trainer_with_reference(model: PreTrainedModel, num_total_steps: int) -> Trainer:
        reference = load_reference(config.model, policy=model) if has_reference else None
        return build_trainer(config, algorithm, model, num_total_steps, reference_model=reference)

    return run_offline(
        config,
        out_dir=out_dir,
        build_plan=partial(build_preference_plan, config),
        build_trainer=build_trainer_with_reference,
    )


def build_preference_plan(config: PreferenceConfig) -> OfflinePlan:
    """Run every check that needs no weights, and read the rows; KTO batches get their mismatched pairs (probes)."""
    is_kto = config.algorithm_type == "kto"
    plan = build_plan(config, partial(PreferenceReader, kind="labels" if is_kto else "pairs"))
    if not is_kto:
        return plan
    add = partial(add_probes, max_model_len=config.model.max_model_len)
    epochs = [[add(batch) for batch in epoch] for epoch in plan.epochs]
    return replace(plan, epochs=epochs, eval_samples=add(plan.eval_samples))
