"""Learning from preferences (DPO, KTO): a fine-tuning whose loss compares the model with what it was at the start."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, PreferenceConfig
from tunesmith.pipeline.data.preference_pairs import PreferenceReader, add_probes
from tunesmith.pipeline.session.extra_models import load_reference
from tunesmith.pipeline.sft.plan import FinetunePlan, build_plan
from tunesmith.pipeline.sft.train import FinetuneResult, build_learner, run_offline
from tunesmith.trainer.trainer import Trainer


def run_preference(config: PreferenceConfig, *, out_dir: Path) -> FinetuneResult:
    """Train into `out_dir`, going on where a killed run of the same settings was; raises when it fails."""
    algorithm = AlgorithmSection(algorithm_type=config.algorithm_type, terms_args=config.terms_args)
    resolve_algorithm(algorithm)

    def build_comparer(model: PreTrainedModel, num_total_steps: int) -> Trainer:
        reference = load_reference(config.model, policy=model)
        return build_learner(config, algorithm, model, num_total_steps, reference_model=reference)

    return run_offline(
        config, out_dir=out_dir, build_plan=partial(build_preference_plan, config), build_learner=build_comparer
    )


def build_preference_plan(config: PreferenceConfig) -> FinetunePlan:
    """Check everything that needs no weights, and read the rows; batches of judgements get their probes."""
    is_kto = config.algorithm_type == "kto"
    plan = build_plan(config, partial(PreferenceReader, kind="judgements" if is_kto else "pairs"))
    if not is_kto:
        return plan
    add = partial(add_probes, max_model_len=config.model.max_model_len)
    epochs = [[add(batch) for batch in epoch] for epoch in plan.epochs]
    return replace(plan, epochs=epochs, eval_samples=add(plan.eval_samples))
