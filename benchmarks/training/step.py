"""Seconds of a whole GRPO step with Tunesmith and TRL: rollouts, rewards, advantages, update.

Both train the same model on the same questions with the same number of tasks, rollouts, new tokens, learning rate and
sampling temperature, plain AdamW and no reference model. Tunesmith runs as users run it: an async workflow that calls
the OpenAI-compatible endpoint in process. The figure is steps per hour, so that higher is better.

    python -m benchmarks.training.step --device cpu --model models/smollm2-135m-instruct --questions gsm8k/train.jsonl
    python -m benchmarks.training.step --device cuda --model models/smollm2-135m-instruct --shape qwen3-0.6b \\
        --tasks 64 ...

With `--turns 8 --result-tokens 500` each rollout is an agent's conversation: eight replies of `--max-new-tokens`, and
between them results of this length, which are read and not trained.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from benchmarks.shared.peer_trl import run_trl_grpo
from benchmarks.shared.report import publish
from benchmarks.shared.shapes import SHAPES, save_random_model
from benchmarks.shared.training_step import (
    build_feed,
    build_parts,
    build_step_config,
    build_tasks,
    build_trainer,
    load_step_actors,
    time_step,
)
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.judges.numeric import score_numeric
from tunesmith.loop import StepParts
from tunesmith.model.load import load_tokenizer
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.storage import load_json_lines
from tunesmith.types import JudgeOutput, WorkflowOutput


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    return JudgeOutput(reward=score(response, task["answer"]))


def score(response: str, answer: str) -> float:
    """1 for a correct answer, minus a small length penalty, so that groups have variance from the start."""
    return float(score_numeric(response, answer) or 0.0) - 1e-4 * len(response)


async def ask_in_turns(task: Mapping[str, Any], model: ChatModel, *, results: Sequence[str]) -> WorkflowOutput:
    """An agent whose tool gives these results; its response is the last reply."""
    messages = [{"role": "user", "content": task["question"]}]
    for result in (*results, None):
        reply = (await model(messages)).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": result}]
    return WorkflowOutput(response=reply)


def write_results(tokenizer: PreTrainedTokenizerBase, *, num_results: int, num_tokens: int) -> list[str]:
    """Texts of about this many tokens: rows of a table of random numbers."""
    rng = random.Random(0)
    ids = tokenizer.encode(" ".join(str(rng.randrange(1000)) for _ in range(num_results * num_tokens)))
    return [tokenizer.decode(ids[index * num_tokens : (index + 1) * num_tokens]) for index in range(num_results)]


def load_questions(path: str, *, num_shots: int) -> list[dict[str, str]]:
    """Questions with the same worked examples before each: the last rows of the file."""
    rows = load_json_lines(Path(path))
    shots = "".join(f"{row['question']}\n{row['answer']}\n\n" for row in rows[len(rows) - num_shots :])
    return [
        {"question": shots + row["question"], "answer": row["answer"].split("####")[-1].strip()}
        for row in rows[: len(rows) - num_shots]
    ]


def run_ours(arguments: argparse.Namespace, questions: list[dict[str, str]]) -> list[dict[str, float]]:
    """Metrics of each step, starting with the warm-up step."""
    config = build_step_config(
        arguments,
        model={"lora": None if arguments.lora_rank is None else {"r": arguments.lora_rank}},
        trainer={"learning_rate": arguments.learning_rate},
        engine={"max_num_seqs": max(256, arguments.tasks * arguments.group)},
    )
    converse = partial(ask_in_turns, results=arguments.results)
    policy, actors = load_step_actors(config, workflow=converse, judge=judge)
    trainer = build_trainer(config, policy, num_steps=arguments.steps + 1)
    parts = build_parts(config, build_feed(build_tasks(questions)), policy, actors, trainer)
    return run_lockstep(run_steps(arguments, parts))


async def run_steps(arguments: argparse.Namespace, parts: StepParts) -> list[dict[str, float]]:
    history = []
    for step in tqdm(range(1, arguments.steps + 2), desc="tunesmith"):
        history.append(await time_step(parts, step=step, device=arguments.device))
        tqdm.write(f"step {step}: {history[-1]['seconds']:.2f} s, of it training {history[-1]['perf/train_s']:.2f} s")
        await asyncio.sleep(0)
    return history


def run_trl(arguments: argparse.Namespace, questions: list[dict[str, str]]) -> dict[str, Any]:
    prompts = [[{"role": "user", "content": row["question"]}] for row in questions]
    batch = arguments.tasks * arguments.group
    results = {}
    sampler = "" if arguments.trl_vllm is None else " with vLLM"
    for micro_batch in arguments.trl_micro_batch or [batch]:
        gc.collect()
        torch.cuda.empty_cache()
        results[f"TRL{sampler}, micro-batch {micro_batch}"] = run_trl_grpo(
            model_path=arguments.model,
            prompts=prompts,
            answers=[row["answer"] for row in questions],
            score=score,
            num_tasks=arguments.tasks,
            group_size=arguments.group,
            max_new_tokens=arguments.max_new_tokens,
            num_steps=arguments.trl_steps or arguments.steps,
            learning_rate=arguments.learning_rate,
            device=arguments.device,
            micro_batch=micro_batch,
            vllm_memory=arguments.trl_vllm,
            lora_rank=arguments.lora_rank,
            max_model_len=arguments.max_model_len,
            results=arguments.results,
        )
    return results


def run_apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a process of its own, whose GPU memory is free afterwards."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit(f"{function.__name__} ended without a result") from None
    finally:
        process.kill()  # vLLM's own shutdown may wait
        process.join()


def send_result(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    sender.send(function(*arguments))


def describe_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings, with file names instead of paths."""
    named = {key: Path(value).name for key, value in vars(arguments).items() if key in {"model", "questions"}}
    return {key: value for key, value in vars(arguments).items() if key not in ("out", "results")} | named


def show(arguments: argparse.Namespace, rows: list[dict[str, float]], peers: dict[str, Any]) -> None:
    """The table: medians over the measured steps."""
    names = ("seconds", "perf/rollout_s", "perf/train_s")
    seconds, rollout_s, train_s = (statistics.median(row[name] for row in rows) for name in names)
    length = statistics.fmean(row["rollout/sampled_tokens_mean"] for row in rows)
    print(
        f"\n{arguments.tasks} tasks x {arguments.group} rollouts, {arguments.max_new_tokens} new tokens, "
        f"{arguments.turns} turns, {arguments.shots} shots, {Path(arguments.model).name}"
    )
    print(f"{'':<28}{'step s':>10}{'rollout s':>11}{'train s':>10}{'tokens/rollout':>16}")
    print(f"{'tunesmith':<28}{seconds:>10.2f}{rollout_s:>11.2f}{train_s:>10.2f}{length:>16.1f}")
    for name, peer in peers.items():
        print(
            f"{name:<28}{statistics.median(peer.seconds_per_step):>10.2f}{'':>21}{peer.mean_completion_tokens:>16.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of all runs")
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="random weights of this shape, with the tokenizer of --model"
    )
    parser.add_argument("--questions", required=True, help="JSON lines file with question and answer")
    parser.add_argument("--tasks", type=int, default=4, help="tasks per step")
    parser.add_argument("--group", type=int, default=8, help="rollouts per task")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens of a reply")
    parser.add_argument("--max-model-len", type=int, default=1024, help="as model.max_model_len")
    parser.add_argument("--turns", type=int, default=1, help="replies of a rollout")
    parser.add_argument("--result-tokens", type=int, default=500, help="tokens of a result between two replies")
    parser.add_argument("--shots", type=int, default=0, help="worked examples before each question")
    parser.add_argument("--steps", type=int, default=3, help="measured steps after one warm-up step")
    parser.add_argument("--trl-steps", type=int, help="measured steps of TRL; default: --steps")
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="constant learning rate")
    parser.add_argument(
        "--trl-micro-batch", type=int, action="append", help="micro-batch of TRL; repeatable; default: the whole batch"
    )
    parser.add_argument(
        "--trl-vllm", type=float, metavar="SHARE", help="TRL samples with vLLM, which gets this share of the GPU memory"
    )
    parser.add_argument("--lora-rank", type=int, help="train an adapter of this rank instead of all weights")
    parser.add_argument("--without-peers", action="store_true", help="do not run TRL")
    parser.add_argument("--out", help="JSON file for the result, results/training/NAME.json")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    questions = load_questions(arguments.questions, num_shots=arguments.shots)[:512]
    tokenizer = load_tokenizer(arguments.model)
    arguments.results = write_results(tokenizer, num_results=arguments.turns - 1, num_tokens=arguments.result_tokens)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape is not None:
            random_model = Path(folder) / arguments.shape
            save_random_model(
                arguments.shape, random_model, tokenizer=arguments.model, device=torch.device(arguments.device)
            )
            arguments.model = str(random_model)
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
        peers = {} if arguments.without_peers else run_apart(run_trl, arguments, questions)
        history = run_ours(arguments, questions)
    ours = statistics.median(row["seconds"] for row in history[1:])
    show(arguments, history[1:], peers)
    publish(
        name="grpo_step",
        unit="steps an hour",
        ours=3600 / ours,
        peers={name: 3600 / statistics.median(peer.seconds_per_step) for name, peer in peers.items()},
        device=arguments.device,
        details={
            "arguments": describe_arguments(arguments),
            "ours": history,
            "peers": {
                name: {"seconds": peer.seconds_per_step, "mean_completion_tokens": peer.mean_completion_tokens}
                for name, peer in peers.items()
            },
        },
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
