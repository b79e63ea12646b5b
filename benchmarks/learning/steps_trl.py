"""What a step of GRPO gains, beside TRL's: the same small model, tasks, reward and settings, both in float32 on a CPU.

The pocket model is fine-tuned on sums of two numbers, half of which are wrong, and is then trained on other sums by
Tunesmith and by `GRPOTrainer` of TRL, which samples with transformers: 32 tasks x 8 rollouts, rate 1e-4 after 5 steps
of warm-up. Reported are the mean reward of the rollouts of every ten steps, and the share of held-out sums that the
model before and after training writes greedily, by transformers' `generate` for both.

    python -m benchmarks.learning.steps_trl --work WORK --seeds 0 1 2 --out results/learning/steps_trl.json
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.peer_trl import PLAIN
from benchmarks.shared.report import publish
from tunesmith import sft, tune
from tunesmith.model.prepare import PREPARERS
from tunesmith.storage import load_json_lines
from tunesmith.tasks.load import write_rows
from tunesmith.types import JudgeOutput, WorkflowOutput

NUM_TRAIN, NUM_TEST, NUM_DEMONSTRATED = 1500, 300, 1500
TASKS, GROUP, WARM_UP, RATE, MAX_TOKENS, WINDOW = 32, 8, 5, 1e-4, 8, 10
WRONG_BY = (-10, -2, -1, 1, 2, 10)


def write_data(work: Path) -> None:
    rng = random.Random(0)
    pairs = [(first, second) for first in range(2, 60) for second in range(2, 60)]
    rng.shuffle(pairs)
    rows = [{"question": f"What is {first} + {second}?", "answer": str(first + second)} for first, second in pairs]
    write_rows(work / "train.jsonl", rows[:NUM_TRAIN])
    write_rows(work / "test.jsonl", rows[NUM_TRAIN : NUM_TRAIN + NUM_TEST])
    demonstrations = []
    for row in rows[NUM_TRAIN + NUM_TEST :][:NUM_DEMONSTRATED]:
        answer = int(row["answer"]) + (rng.choice(WRONG_BY) if rng.random() < 0.5 else 0)
        reply = {"role": "assistant", "content": str(answer)}
        demonstrations.append({"messages": [*ask(row), reply]})
    write_rows(work / "sft.jsonl", demonstrations)


def ask(row: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["question"]}]


def fine_tune(work: Path) -> Path:
    PREPARERS["pocket"](work / "pocket", "float32")
    (work / "sft.yaml").write_text(
        f"{{model: {{path: {work}/pocket, max_model_len: 128}}, train_dataset: {{path: {work}/sft.jsonl}}, "
        "num_epochs: 12, max_rows_per_batch: 64, "
        "trainer: {learning_rate: 1e-3, warmup_steps: 10, schedule: cosine}}"
    )
    return Path(sft(work / "sft.yaml", out=work / "sft").model_path)


async def answer(task: dict[str, Any], model: Any) -> WorkflowOutput:
    completion = await model(ask(task))
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    return JudgeOutput(reward=float(response.strip() == task["answer"]))


def train_own(work: Path, model: Path, *, seed: int, steps: int) -> tuple[list[float], Path]:
    """The mean reward of each step, and the trained model."""
    config = work / f"own_{seed}.yaml"
    config.write_text(
        f"{{checkpoint_root_dir: {work}, project: own, name: '{seed}', seed: {seed}, total_steps: {steps}, "
        f"model: {{path: {model}, max_model_len: 128, max_tokens: {MAX_TOKENS}}}, "
        f"train_dataset: {{path: {work}/train.jsonl}}, rollout: {{chat_model: openai}}, "
        f"algorithm: {{algorithm_type: grpo, batch_size: {TASKS}, group_size: {GROUP}}}, "
        f"trainer: {{learning_rate: {RATE}, warmup_steps: {WARM_UP}}}}}"
    )
    result = tune(config, workflow_func=answer, judge_func=judge)
    rows = load_json_lines(work / "own" / str(seed) / "metrics.jsonl")
    return [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row], Path(result.model_path)


def train_trl(work: Path, model: Path, *, seed: int, steps: int) -> tuple[list[float], Path]:
    """The same with TRL."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_json_lines(work / "train.jsonl")
    random.Random(seed).shuffle(rows)
    prompts = [tokenizer.apply_chat_template(ask(row), add_generation_prompt=True, tokenize=False) for row in rows]
    config = GRPOConfig(
        output_dir=str(work / "trl" / str(seed)),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=TASKS * GROUP,
        num_generations=GROUP,
        max_completion_length=MAX_TOKENS,
        max_steps=steps,
        learning_rate=RATE,
        warmup_steps=WARM_UP,
        loss_type="dapo",
        seed=seed,
        **PLAIN | {"lr_scheduler_type": "constant_with_warmup"},
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=tokenizer,
        reward_funcs=lambda completions, answer, **_: [
            float(text.strip() == gold) for text, gold in zip(completions, answer, strict=True)
        ],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in rows]}),
    )
    trainer.train()
    out = work / "trl" / str(seed) / "model"
    trainer.save_model(str(out))
    return [row["reward"] for row in trainer.state.log_history if "reward" in row], out


def measure_accuracy(work: Path, folder: Path, model: Path) -> float:
    """The share of held-out sums that greedy decoding writes; the tokenizer is that of `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    rows = load_json_lines(work / "test.jsonl")
    prompts = [tokenizer.apply_chat_template(ask(row), add_generation_prompt=True, tokenize=False) for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.no_grad():
        ids = network.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )  # fmt: skip
    replies = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return fmean(reply.strip() == row["answer"] for reply, row in zip(replies, rows, strict=True))


def window_means(values: Sequence[float]) -> list[float]:
    return [round(fmean(values[start : start + WINDOW]), 4) for start in range(0, len(values), WINDOW)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="new folder for models and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work = arguments.work.resolve()
    work.mkdir(parents=True)
    write_data(work)
    model = fine_tune(work)
    before = measure_accuracy(work, model, model)
    print(f"before: {before:.3f} of the held-out sums", flush=True)
    runs: dict[str, dict[str, Any]] = {}
    for seed in arguments.seeds:
        for name, train in (("tunesmith", train_own), ("trl", train_trl)):
            rewards, trained = train(work, model, seed=seed, steps=arguments.steps)
            runs[f"{name} {seed}"] = {
                "rewards": window_means(rewards), "accuracy": measure_accuracy(work, model, trained)
            }  # fmt: skip
            print(f"{name} {seed}: {json.dumps(runs[f'{name} {seed}'])}", flush=True)
    means = {
        name: fmean(run["accuracy"] for key, run in runs.items() if key.startswith(name))
        for name in ("tunesmith", "trl")
    }
    publish(
        name="steps_trl", unit="held-out accuracy after training", ours=means["tunesmith"], peers={"trl": means["trl"]},
        device="cpu", details={"before": before, "runs": runs}, out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
