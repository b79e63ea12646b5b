"""TRL's SFTTrainer as a peer: seconds and loss of each step on given tokens, from given weights or a given adapter.

The fastest settings found for one process: fused AdamW, no gradient checkpointing, rows in file order.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLAIN: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}
"""Settings of `SFTConfig` that are the same in every measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    seconds_per_step: list[float]
    """From the end of one step to the end of the next; the first step is missing."""
    losses: list[float]
    """Losses of all steps, including the first."""


def run_trl_sft(
    *,
    model_path: str,
    adapter_path: str | None,
    is_quantized: bool,
    token_ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    rows_per_batch: int,
    micro_batch: int,
    is_padding_free: bool,
    has_narrow_weights: bool,
    learning_rate: float,
    device: str,
) -> PeerRun:
    """Train one epoch over the rows, in order; `labels` are -100 for tokens that do not train.

    A GPU computes in bfloat16. Trained weights are float32 there, as Tunesmith's masters are; with `has_narrow_weights`
    they are bfloat16, which is faster and rounds updates away.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            if device != "cpu":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())

    model = load_model(
        model_path, adapter_path, is_quantized=is_quantized, has_narrow_weights=has_narrow_weights, device=device
    )
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            use_cpu=device == "cpu",
            bf16=device != "cpu",
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=rows_per_batch // micro_batch,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            max_length=None,
            padding_free=is_padding_free,
            learning_rate=learning_rate,
            **PLAIN,
        )
        trainer = SFTTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(model_path),
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": list(token_ids), "labels": list(labels)}),
            callbacks=[Clock()],
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    seconds = [after - before for before, after in itertools.pairwise(stamps)]
    return PeerRun(seconds_per_step=seconds, losses=losses)


def load_model(
    model_path: str, adapter_path: str | None, *, is_quantized: bool, has_narrow_weights: bool, device: str
) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = torch.bfloat16 if has_narrow_weights and device != "cpu" else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32 if device == "cpu" else torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        dtype=dtype,
        device_map={"": device},
        **({"quantization_config": quantization} if is_quantized else {}),
    )
    return model if adapter_path is None else PeftModel.from_pretrained(model, adapter_path, is_trainable=True)
