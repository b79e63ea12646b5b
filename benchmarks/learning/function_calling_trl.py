"""GRPOTrainer of TRL with vLLM on the tasks of `recipes/function_calling`: same tasks, reward and reader of calls.

Prompts are rendered here by the model's own template with the tools of each row; a reply is paid by the reader of calls
and the checker that Tunesmith uses, and questions that no function answers as there. The loss is TRL's `dapo` (a mean
over the tokens of the batch) with advantages scaled by the group, as in the recipe; rate, warm-up, clip, batch and
group are equal too. A step's seconds include sampling, rewards and the update. Checkpoints are saved outside of the
clock and are evaluated by `tunesmith eval`.

    python -m benchmarks.learning.function_calling_trl --model PATH --data BFCL --steps 8 --save 4 --folder FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.learning.function_calling import judge
from benchmarks.shared.peer_trl import PLAIN, prepare_vllm
from recipes.function_calling.conversations import load_tasks
from tunesmith.environments.sets.bfcl import Row, find_data


def load_prompts(data: str | None, tokenizer: Any, *, max_prompt: int, seed: int) -> tuple[dict[str, Row], Any]:
    """The rows by id, and a shuffled data set of the training rows whose prompt is at most `max_prompt` tokens."""
    from datasets import Dataset

    rows = load_tasks(find_data(data))
    names = sorted(name for name, row in rows.items() if not row.is_held_out)
    random.Random(seed).shuffle(names)
    prompts = [
        tokenizer.apply_chat_template(
            rows[name].line["question"][0], tools=rows[name].schemas, add_generation_prompt=True, tokenize=False
        )
        for name in names
    ]
    kept = [
        (name, text) for name, text in zip(names, prompts, strict=True) if len(tokenizer(text).input_ids) <= max_prompt
    ]
    print(f"{len(kept)} of {len(names)} prompts have at most {max_prompt} tokens")
    return rows, Dataset.from_dict({"prompt": [text for _, text in kept], "name": [name for name, _ in kept]})


def build_saver(folder: Path, steps: int, seconds: list[float]) -> Any:
    """A callback that times steps, and saves the weights every `steps` steps outside of the time."""
    import torch
    from transformers import TrainerCallback

    class Saver(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: object, state: Any, __: object, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.started)
            if state.global_step % steps == 0:
                path = folder / f"step_{state.global_step:06d}"
                kwargs["model"].save_pretrained(path)
                kwargs["processing_class"].save_pretrained(path)

        def on_log(self, _: object, state: Any, __: object, logs: Mapping[str, Any], **___: object) -> None:
            line = {"step": state.global_step, "seconds": seconds[-1] if seconds else None} | dict(logs)
            with (folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    return Saver()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model and its tokenizer")
    parser.add_argument("--data", help="folder of bfcl-eval's data; the installed package's without it")
    parser.add_argument("--folder", type=Path, required=True, help="folder of checkpoints and the log")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=int, default=25, help="save the weights every so many steps")
    parser.add_argument("--tasks", type=int, default=96)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8, help="rollouts of a forward and backward")
    parser.add_argument("--max-prompt", type=int, default=3072, help="longer prompts are left out")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="share of vLLM; 0 samples with generate")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    vllm = prepare_vllm(arguments.gpu_memory) if arguments.gpu_memory else {}
    if vllm:
        vllm["vllm_max_model_length"] = arguments.max_prompt + arguments.max_tokens
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows, dataset = load_prompts(arguments.data, tokenizer, max_prompt=arguments.max_prompt, seed=arguments.seed)
    seconds: list[float] = []
    has_gpu = torch.cuda.is_available()
    plain = PLAIN | {"lr_scheduler_type": "constant_with_warmup"}
    config = GRPOConfig(
        output_dir=str(arguments.folder / "trainer"),
        use_cpu=not has_gpu,
        bf16=has_gpu,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.tasks * arguments.group // arguments.micro_batch,
        num_generations=arguments.group,
        max_completion_length=arguments.max_tokens,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        warmup_steps=5,
        loss_type="dapo",
        seed=arguments.seed,
        **plain,
        **vllm,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32"),  # bf16 autocast on a GPU
        processing_class=tokenizer,
        reward_funcs=lambda completions, name, **_: [
            float(judge(text, 0, 0.0, rows[each]).is_right) for text, each in zip(completions, name, strict=True)
        ],
        args=config,
        train_dataset=dataset,
        callbacks=[build_saver(arguments.folder, arguments.save, seconds)],
    )
    trainer.train()
    print(json.dumps({"steps": len(seconds), "seconds": sum(seconds), "median_s": sorted(seconds)[len(seconds) // 2]}))


if __name__ == "__main__":
    main()
