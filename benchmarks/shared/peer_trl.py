"""TRL's GRPOTrainer as a peer: seconds of a GRPO step on the same model, prompts and lengths.

The fastest settings found for one process: no gradient checkpointing, all completions in one generation batch, no
reference model (beta 0), one optimizer step per batch. It samples with transformers' `generate`, or with vLLM in the
same process (`vllm_mode="colocate"`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of vLLM inside of TRL's process; torchrun sets the first five."""

PLAIN: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "beta": 0.0,
    "temperature": 1.0,
    "top_k": 0,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "shuffle_dataset": False,
    "ddp_find_unused_parameters": False,
}
"""Settings of `GRPOConfig` that are the same in every measurement."""


REPLY = "the reply of a turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    seconds_per_step: list[float]
    mean_completion_tokens: float


def run_trl_grpo(
    *,
    model_path: str,
    prompts: list[list[dict[str, str]]],
    answers: list[str],
    score: Callable[[str, str], float],
    num_tasks: int,
    group_size: int,
    max_new_tokens: int,
    num_steps: int,
    learning_rate: float,
    device: str,
    micro_batch: int,
    vllm_memory: float | None = None,
    lora_rank: int | None = None,
    max_model_len: int = 1024,
    results: Sequence[str] = (),
    on_step: Callable[[list[float]], None] = lambda seconds: None,
) -> PeerResult:
    """Train `num_steps` steps after one warm-up step; each forward and backward has `micro_batch` completions.

    With `results` an agent has one more turn than there are results, each of `max_new_tokens`; these are the user's
    messages between them, which are not trained.

    `vllm_memory` is the share of the GPU memory for vLLM; None samples with `generate`. `lora_rank` trains an adapter
    of the attention projections instead of all weights. `on_step` receives the seconds of all steps so far. Under
    torchrun each process calls this, `num_tasks` are those of one, and prompts are those of all.
    """
    vllm = {} if vllm_memory is None else prepare_vllm(vllm_memory, max_model_len=max_model_len)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    stamps: list[float] = []

    def reward(completions: list, answer: list[str], **_: object) -> list[float]:
        return [score(completion[0]["content"], gold) for completion, gold in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=device == "cpu",
            bf16=device != "cpu",
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=num_tasks * group_size // micro_batch,
            num_generations=group_size,
            max_completion_length=max_new_tokens,
            max_steps=num_steps + 1,
            learning_rate=learning_rate,
            **PLAIN,
            **vllm,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype="float32" if device == "cpu" else "bfloat16"),
            processing_class=AutoTokenizer.from_pretrained(model_path),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts, "answer": answers}),
            callbacks=[build_clock(stamps, on_step, device=device)],
            peft_config=None if lora_rank is None else build_lora(lora_rank),
            rollout_func=partial(run_turns, results=results) if results else None,
        )
        trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    seconds = [end - start for start, end in zip(stamps[0::2], stamps[1::2], strict=True)]
    return PeerResult(seconds_per_step=seconds[1:], mean_completion_tokens=sum(lengths[1:]) / max(1, len(lengths[1:])))


def run_turns(prompts: list[Any], trainer: Any, *, results: Sequence[str]) -> dict[str, Any]:
    """TRL's `rollout_func`: all agents' turns together, with a message of the user after each but the last."""
    tokenizer = trainer.processing_class
    prompt_ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    rows, num_generations = prompt_ids, trainer.num_generations  # equal prompts of a group, in the first turn
    completion_ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    mask: list[list[int]] = [[] for _ in prompts]
    for between in (*(encode_message(tokenizer, result) for result in results), []):
        sampled, sampled_logprobs = trainer._generate_single_turn(rows, None, {}, num_generations)
        for index, (ids, values) in enumerate(zip(sampled, sampled_logprobs or [None] * len(prompts), strict=True)):
            ids = list(ids)
            completion_ids[index] += ids + between
            logprobs[index] += [*(values if values is not None else [0.0] * len(ids)), *([0.0] * len(between))]
            mask[index] += [1] * len(ids) + [0] * len(between)
        rows = [prompt + completion for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        num_generations = 1
    known = None if sampled_logprobs is None else logprobs
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": known, "env_mask": mask}


def encode_message(tokenizer: Any, text: str) -> list[int]:
    """The tokens from the end of an assistant's message over a message of the user to the start of the next one."""
    messages = [
        {"role": "user", "content": ""}, {"role": "assistant", "content": REPLY}, {"role": "user", "content": text},
    ]  # fmt: skip
    rendered: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(rendered.split(REPLY, 1)[1], add_special_tokens=False)
    return ids


def prepare_vllm(memory: float, *, max_model_len: int = 1024) -> dict[str, Any]:
    """The settings of `GRPOConfig` for vLLM in this process, whose environment is set."""
    for name, value in ONE_PROCESS.items():
        os.environ.setdefault(name, value)
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": memory,
        "vllm_max_model_length": max_model_len,
    }


def build_clock(stamps: list[float], on_step: Callable[[list[float]], None], *, device: str) -> Any:
    """A callback that appends the times at which steps begin and end to `stamps`."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.stamp()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.stamp()
            on_step([end - start for start, end in zip(stamps[0::2], stamps[1::2], strict=True)])

        def stamp(self) -> None:
            if device != "cpu":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())

    return Clock()


def build_lora(rank: int) -> Any:
    """An adapter of the attention projections, as `model.lora` with its defaults."""
    from peft import LoraConfig

    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(r=rank, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM")
